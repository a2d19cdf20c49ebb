"""E-mail over SMTP, with TLS from the start (smtps), by STARTTLS (smtp) or without any (smtp+plain)."""

import smtplib
from collections.abc import Sequence
from email.headerregistry import Address
from email.message import EmailMessage
from urllib.parse import unquote, urlsplit
from uuid import UUID

import httpx

from billing.alerts.message import Message
from billing.alerts.senders.outgoing import RefusedError, is_url

PORTS = {"smtps": 465, "smtp": 587, "smtp+plain": 25}


def compose(message: Message, delivery: UUID, sender: str, recipients: Sequence[str]) -> EmailMessage:
    """The delivery's id is the Message-ID too: most mail programs show a repetition once."""
    mail = EmailMessage()
    mail["Subject"] = " ".join(f"[Farthing] {message.title}".split())
    mail["From"] = sender
    mail["To"] = tuple(Address(addr_spec=each) for each in recipients)
    mail["Date"] = message.at
    mail["Message-ID"] = f"<{delivery}@{sender.rpartition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content("\n\n".join([message.title, *message.lines]))
    return mail


def send_mail(mail: EmailMessage, url: str, timeout: float) -> str | None:
    """Blocking. What the server says of recipients that it refused, where others have the mail now; else None.

    Raises ValueError on a bad address, RefusedError, and OSError when the server cannot be reached.
    """
    if not is_url(url) or not (parts := urlsplit(url)).hostname or parts.scheme not in PORTS:
        raise ValueError(f"the address of e-mail must be like smtps://USER:PASSWORD@HOST ({', '.join(PORTS)})")
    port = parts.port or PORTS[parts.scheme]
    context = httpx.create_ssl_context()
    try:
        server: smtplib.SMTP
        if parts.scheme == "smtps":
            server = smtplib.SMTP_SSL(parts.hostname, port, timeout=timeout, context=context)
        else:
            server = smtplib.SMTP(parts.hostname, port, timeout=timeout)
        with server:
            if parts.scheme == "smtp":
                server.starttls(context=context)
            if parts.username is not None:
                server.login(unquote(parts.username), unquote(parts.password or ""))
            refused = server.send_message(mail)
    except smtplib.SMTPRecipientsRefused as error:
        raise RefusedError(_reasons(error.recipients)) from None
    except smtplib.SMTPResponseException as error:
        raise RefusedError(f"{error.smtp_code} {_text(error.smtp_error)}") from None
    except smtplib.SMTPException as error:
        raise RefusedError(f"{type(error).__name__}: {error}"[:200]) from None
    return _reasons(refused) if refused else None


def _reasons(refused: dict[str, tuple[int, bytes]]) -> str:
    return "; ".join(f"{who}: {code} {_text(reason)}" for who, (code, reason) in refused.items())[:500]


def _text(reply: bytes | str) -> str:
    return (reply if isinstance(reply, str) else reply.decode("utf-8", "replace"))[:200]
