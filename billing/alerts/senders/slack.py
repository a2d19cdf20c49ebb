"""Slack's incoming webhooks: blocks, and a text for where no blocks are shown."""

import msgspec

from billing.alerts.message import Message
from billing.alerts.senders.outgoing import JSON, Outgoing, nothing_to_check

_LONGEST_TEXT = 3000
"""In characters, of one block."""


def slack(message: Message, url: str) -> Outgoing:
    blocks = [
        {"type": "header", "text": {"type": "plain_text", "text": message.title, "emoji": False}},
        *({"type": "section", "text": {"type": "mrkdwn", "text": _escape(line)}} for line in message.lines),
    ]
    body = msgspec.json.encode({"text": _escape(f"{message.title}: {message.summary}"), "blocks": blocks})
    return Outgoing(url=url, headers=JSON, body=body, check=nothing_to_check)


def _escape(text: str) -> str:
    """`<!channel>` would call everybody, and a tag's value comes from whoever may set one."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped if len(escaped) <= _LONGEST_TEXT else escaped[: _LONGEST_TEXT - 1] + "…"
