"""Calls as the surfaces decode them."""

from typing import Any

import msgspec

from gateway.api.openai import decode_chat
from gateway.call import Call


def chat_call(text: str = "hi", **fields: Any) -> Call:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    return decode_chat(msgspec.json.encode(body))
