"""DingTalk, custom robots: Markdown; where the robot has a signing secret, timestamp and sign are in the address."""

import base64
import hashlib
import hmac
from datetime import datetime
from urllib.parse import urlencode

import msgspec

from billing.alerts.message import Message
from billing.alerts.senders.outgoing import JSON, Outgoing, code_is_zero, harmless


def dingtalk(message: Message, url: str, secret: str | None, now: datetime) -> Outgoing:
    text = "\n\n".join([f"#### {harmless(message.title)}", *map(harmless, message.lines)])
    body = msgspec.json.encode({"msgtype": "markdown", "markdown": {"title": message.title, "text": text}})
    if secret is not None:
        at = str(int(now.timestamp() * 1000))
        sign = hmac.new(secret.encode(), f"{at}\n{secret}".encode(), hashlib.sha256).digest()
        query = urlencode({"timestamp": at, "sign": base64.b64encode(sign).decode()})
        url += ("&" if "?" in url else "?") + query
    return Outgoing(url=url, headers=JSON, body=body, check=code_is_zero("errcode", "errmsg"))
