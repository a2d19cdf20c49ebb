"""What translations of conversations share: reading an item's text, and content in chat's simplest form."""

from typing import Any

from gateway.api.fields import invalid

Json = dict[str, Any]


def string(item: Json, name: str, where: str) -> str:
    """The field of an item that is at `where` in the body. Raises ApiError 400 naming it where it is no string."""
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", "must be a string")
    return value


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def apart(parts: list[Json]) -> tuple[list[Json], list[Json]]:
    """(texts, everything else)."""
    return [p for p in parts if p["type"] == "text"], [p for p in parts if p["type"] != "text"]


def simple(parts: list[Json]) -> str | list[Json]:
    """Content of a chat message: one text as a string, which every upstream takes."""
    if not parts:
        return ""
    text: str | None = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else None
    return parts if text is None else text
