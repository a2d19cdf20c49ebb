"""A plain webhook: JSON, signed as Standard Webhooks (standardwebhooks.com) says, whose libraries verify it."""

import base64
import binascii
import hashlib
import hmac
from datetime import datetime
from uuid import UUID

import msgspec

from billing.alerts.message import Message
from billing.alerts.senders.outgoing import JSON, Outgoing, nothing_to_check

_PREFIX = "whsec_"


def webhook(message: Message, delivery: UUID, url: str, secret: str | None, now: datetime) -> Outgoing:
    """`secret`: whsec_ and base64, as those libraries take it, or any text. Raises ValueError on bad base64."""
    body = msgspec.json.encode({"type": f"alert.{message.event}", "timestamp": now, "data": message})
    headers = dict(JSON)
    if secret is not None:
        at = str(int(now.timestamp()))
        signed = hmac.new(_key(secret), f"{delivery}.{at}.".encode() + body, hashlib.sha256).digest()
        headers |= {"webhook-timestamp": at, "webhook-signature": f"v1,{base64.b64encode(signed).decode()}"}
    return Outgoing(url=url, headers=headers, body=body, check=nothing_to_check)


def _key(secret: str) -> bytes:
    if not secret.startswith(_PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("its secret begins with whsec_, but what follows is not base64") from None
