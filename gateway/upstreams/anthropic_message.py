"""What Anthropic's answers say, in OpenAI's words."""

from typing import Any

import msgspec

from gateway.upstreams.characters import characters

Json = dict[str, Any]

_FINISH = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""By Anthropic's stop reason; any other is a stop."""


def finish(reason: Any, sequence: Any) -> Json:
    """The end of a choice; `stop_reason` tells which string ended it, by the name that vLLM gave it."""
    ending = {"finish_reason": _FINISH.get(reason, "stop")}
    return ending | ({"stop_reason": sequence} if sequence else {})


def detail(kind: str, index: int, **fields: Any) -> Json:
    """Thinking that the model wants back unread, as OpenRouter's callers know it."""
    return {"type": f"reasoning.{kind}", **fields, "format": "anthropic-claude-v1", "index": index}


def said_in(content: list[Json]) -> tuple[Json, int]:
    """(a message's fields, how many characters were generated for it: see `characters`)."""
    texts: list[str] = []
    thoughts: list[str] = []
    details: list[Json] = []
    calls: list[Json] = []
    for block in content:
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
            if block.get("signature"):
                details.append(detail("text", len(details), text=thoughts[-1], signature=block["signature"]))
        elif kind == "redacted_thinking":
            details.append(detail("encrypted", len(details), data=block.get("data")))
        elif kind == "tool_use":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            function = {"name": str(block.get("name") or ""), "arguments": arguments}
            calls.append({"id": str(block.get("id") or ""), "type": "function", "function": function})
    said: Json = {"content": "".join(texts) if texts or not calls else None, "refusal": None}
    said |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    said |= {"reasoning_details": details} if details else {}
    said |= {"tool_calls": calls} if calls else {}
    called = [call["function"][part] for call in calls for part in ("name", "arguments")]
    return said, sum(map(characters, [*texts, *thoughts, *called]))
