"""Sending one message to one channel, once: its address and secret are read now, so a new one counts at once."""

import asyncio
import functools
import ssl
from datetime import UTC, datetime
from uuid import UUID

import httpx

from billing.alerts.channels import Channel, resolve
from billing.alerts.message import Message, one_line
from billing.alerts.senders.dingtalk import dingtalk
from billing.alerts.senders.email import compose, send_mail
from billing.alerts.senders.feishu import feishu
from billing.alerts.senders.outgoing import Outgoing, RefusedError, is_url
from billing.alerts.senders.slack import slack
from billing.alerts.senders.webhook import webhook
from billing.alerts.senders.wecom import wecom

SECONDS = 10.0
"""For all of one sending."""
LARGEST_ANSWER = 64 * 1024
_SHOWN = 200
"""Characters of an answer that says no."""


class SendError(Exception):
    """It was not taken; the message says why, without the address or the secret."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(one_line(reason))
        self.retry_after = retry_after
        """Seconds that the receiver asked for."""


async def send(channel: Channel, message: Message, delivery: UUID) -> str | None:
    """Send it, or raise SendError. The same delivery may be sent again: its id goes with it.

    Returns what is to be known although it was taken: that a mail's server refused some of its recipients.
    No error is another one: what cannot be sent must not be tried again and again, nor hold up what can.
    """
    try:
        async with asyncio.timeout(SECONDS):
            url = await asyncio.to_thread(resolve, channel.address)
            secret = None if channel.secret is None else await asyncio.to_thread(resolve, channel.secret)
            if channel.kind == "email":
                mail = compose(message, delivery, channel.sender or "", channel.recipients or ())
                return await asyncio.to_thread(send_mail, mail, url, SECONDS)
            await _post(outgoing(channel, message, delivery, url, secret), delivery)
            return None
    except UnicodeError:
        raise SendError("its address is not a URL") from None
    except (ValueError, RefusedError) as error:
        raise SendError(str(error)) from None
    except TimeoutError:
        raise SendError(f"no answer within {SECONDS:g} seconds") from None
    except httpx.InvalidURL:
        raise SendError("its address is not a URL") from None
    except (httpx.HTTPError, OSError) as error:
        # What httpx says of a request can have its URL in it, and so the token there.
        raise SendError(f"it cannot be reached: {type(error).__name__}") from None
    except SendError:
        raise
    except Exception as error:  # its text may have the address in it
        raise SendError(f"it cannot be sent: {type(error).__name__}") from None


def outgoing(channel: Channel, message: Message, delivery: UUID, url: str, secret: str | None) -> Outgoing:
    """The request for an HTTP channel. Raises ValueError when its address cannot be one."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("its address must start with http:// or https://")
    if not is_url(url):
        raise ValueError("its address is not a URL")
    now = datetime.now(UTC)
    match channel.kind:
        case "webhook":
            return webhook(message, delivery, url, secret, now)
        case "slack":
            return slack(message, url)
        case "feishu":
            return feishu(message, url, secret, now)
        case "dingtalk":
            return dingtalk(message, url, secret, now)
        case _:
            return wecom(message, url)


async def _post(request: Outgoing, delivery: UUID) -> None:
    context = await asyncio.to_thread(_tls)  # reads hundreds of certificates
    headers = {**request.headers, "webhook-id": str(delivery), "user-agent": "Farthing"}
    async with (
        httpx.AsyncClient(timeout=SECONDS, follow_redirects=False, verify=context) as client,
        client.stream("POST", request.url, headers=headers, content=request.body) as answer,
    ):
        body = b""
        async for piece in answer.aiter_raw(8192):
            body += piece
            if len(body) > LARGEST_ANSWER:
                raise RefusedError(f"its answer is larger than {LARGEST_ANSWER} bytes; is the address right?")
        if not answer.is_success:
            text = body.decode("utf-8", "replace")[:_SHOWN]
            raise SendError(f"HTTP {answer.status_code}: {text}".rstrip(": "), _retry_after(answer))
    request.check(body)


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _retry_after(answer: httpx.Response) -> float | None:
    value = answer.headers.get("retry-after", "")
    return min(float(value), 3600.0) if value.isascii() and value.isdigit() else None
