"""WeCom, group robots: Markdown of at most 4096 bytes. They are not signed: the key in their address is the secret."""

import msgspec

from billing.alerts.message import Message
from billing.alerts.senders.outgoing import JSON, Outgoing, code_is_zero, harmless

_LARGEST_TEXT = 4096
"""In bytes of UTF-8."""


def wecom(message: Message, url: str) -> Outgoing:
    text = "\n".join([f"**{harmless(message.title)}**", *(f"> {harmless(line)}" for line in message.lines)])
    if len(text.encode()) > _LARGEST_TEXT:
        text = text.encode()[: _LARGEST_TEXT - 3].decode("utf-8", "ignore") + "…"
    body = msgspec.json.encode({"msgtype": "markdown", "markdown": {"content": text}})
    return Outgoing(url=url, headers=JSON, body=body, check=code_is_zero("errcode", "errmsg"))
