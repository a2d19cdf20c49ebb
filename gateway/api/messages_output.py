"""Answers in Anthropic's Messages format: a message's blocks, its usage, its stop reason, its errors."""

import secrets
from typing import Any

import msgspec

from gateway.api.chunk import Choice, Chunk
from gateway.api.openai import anthropic_error
from gateway.api.parts import Part, Parts
from gateway.errors import ApiError, UpstreamReplyError
from gateway.upstreams.usage import Usage

_STOP_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
"""By OpenAI's finish reason; any other is an end of the turn."""


def new_message(chunk: Chunk, usage: dict[str, Any]) -> dict[str, Any]:
    """A message without content that has not stopped yet."""
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": chunk.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def blocks(parts: Parts) -> list[dict[str, Any]]:
    return [_whole_block(part) for part in parts.row]


def _whole_block(part: Part) -> dict[str, Any]:
    block = empty_block(part)
    if part.kind == "tool":
        block["input"] = _input(part)
    elif part.kind == "thinking":
        block |= {"thinking": part.text, "signature": part.signature}
    elif part.kind != "redacted":
        block["text"] = part.text
    return block


def empty_block(part: Part) -> dict[str, Any]:
    """A block as `content_block_start` has it. A refusal's words are text: Anthropic has the stop reason for it."""
    if part.kind == "tool":
        part.id = part.id or f"toolu_{secrets.token_hex(12)}"
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
    if part.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if part.kind == "redacted":
        return {"type": "redacted_thinking", "data": part.signature}
    return {"type": "text", "text": ""}


def delta(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "tool":
        return {"type": "input_json_delta", "partial_json": text}
    if part.kind == "thinking":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _input(part: Part) -> Any:
    """A call's arguments; where they are no object (the answer was cut), their text under Anthropic's name for that."""
    if not part.utf8:
        return {}
    return msgspec.Raw(bytes(part.utf8)) if part.is_object else {"INVALID_JSON": part.text}


def stop(choice: Choice | None, parts: Parts, stop_sequences: list[str]) -> dict[str, Any]:
    """`stop_reason` and `stop_sequence`. Which string ended the answer is known where the upstream tells it."""
    kinds = {part.kind for part in parts.row}
    finish = choice.finish_reason if choice is not None else None
    found = choice.stop_string if choice is not None else None
    if finish == "stop" and found in stop_sequences:
        return {"stop_reason": "stop_sequence", "stop_sequence": found}
    reason = _STOP_REASONS.get(finish or "", "end_turn")
    if reason == "end_turn" and "tool" in kinds:
        reason = "tool_use"
    if reason == "end_turn" and "refusal" in kinds:
        reason = "refusal"
    return {"stop_reason": reason, "stop_sequence": None}


def usage_object(usage: Usage | None, prompt_tokens: int | None = None) -> dict[str, Any]:
    """Anthropic counts what came from the cache and what was written to it beside `input_tokens`, not inside.

    `prompt_tokens`: what is known of the prompt while nobody reported usage.
    """
    if usage is None:
        usage = Usage(prompt_tokens or 0)
    fresh = usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens
    return {
        "input_tokens": max(fresh, 0),
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def error_object(error: ApiError) -> dict[str, Any]:
    words = {"type": error.anthropic_type, "message": error.message}
    return {"type": "error", "error": words, "request_id": error.request_id}


def error_body(error: ApiError) -> bytes:
    """An upstream's own error body goes to the caller as it came where it is in this shape."""
    if isinstance(error, UpstreamReplyError) and anthropic_error(error.body):
        return error.body
    return msgspec.json.encode(error_object(error))
