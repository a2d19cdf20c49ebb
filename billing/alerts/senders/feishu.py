"""Feishu and Lark, custom bots: a card; where the bot has a signing secret, timestamp and sign are in the body."""

import base64
import hashlib
import hmac
from datetime import datetime
from typing import Any

import msgspec

from billing.alerts.message import Message
from billing.alerts.senders.outgoing import JSON, Outgoing, code_is_zero

_COLOURS = {"opened": "red", "worse": "red", "resolved": "green", "test": "blue"}


def feishu(message: Message, url: str, secret: str | None, now: datetime) -> Outgoing:
    elements = [{"tag": "div", "text": {"tag": "plain_text", "content": line}} for line in message.lines]
    header = {"title": {"tag": "plain_text", "content": message.title}, "template": _COLOURS[message.event]}
    body: dict[str, Any] = {"msg_type": "interactive", "card": {"header": header, "elements": elements}}
    if secret is not None:
        at = str(int(now.timestamp()))
        # The text to sign is the key here, and what is signed is empty.
        sign = hmac.new(f"{at}\n{secret}".encode(), b"", hashlib.sha256).digest()
        body |= {"timestamp": at, "sign": base64.b64encode(sign).decode()}
    return Outgoing(url=url, headers=JSON, body=msgspec.json.encode(body), check=code_is_zero("code", "msg"))
