"""Reasoning in the Responses format: its text, and what its model wants back unread (there it is called encrypted)."""

from typing import Any

from gateway.api.parts import Part

Json = dict[str, Any]

_SIGNED = "signed."
_HIDDEN = "hidden."
"""Before a signature of the text beside it, and before reasoning of which there is nothing to read."""


def encrypted(part: Part) -> str | None:
    if not part.signature:
        return None
    return (_HIDDEN if part.kind == "redacted" else _SIGNED) + part.signature


def thoughts(item: Json) -> str:
    """The text of an item: all of it where it has that, else its summary."""
    for name in ("content", "summary"):
        parts = item.get(name)
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        if text := "".join(text for text in texts if isinstance(text, str)):
            return text
    return ""


def details(item: Json) -> list[Json]:
    """What a chat message gives back to the model; what another service has encrypted nobody here can read."""
    secret = item.get("encrypted_content")
    if not isinstance(secret, str):
        return []
    if secret.startswith(_HIDDEN):
        return [{"type": "reasoning.encrypted", "data": secret.removeprefix(_HIDDEN)}]
    if secret.startswith(_SIGNED):
        return [{"type": "reasoning.text", "text": thoughts(item), "signature": secret.removeprefix(_SIGNED)}]
    return []
