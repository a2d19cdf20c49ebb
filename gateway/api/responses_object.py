"""The response object: the request's settings, the items of the answer, its usage and how it ended."""

import secrets
import time
from typing import Any

import msgspec

from gateway.api.parts import Part
from gateway.api.responses_reasoning import encrypted
from gateway.call import Call
from gateway.errors import ApiError
from gateway.upstreams.usage import Usage

Json = dict[str, Any]

_DEFAULTS: Json = {
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": None,
    "text": {"format": {"type": "text"}},
    "top_logprobs": 0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that its response repeats, with what stands for those left out."""

UNFINISHED = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""By finish reason, why a response is incomplete."""
_PREFIXES = {"thinking": "rs", "redacted": "rs", "text": "msg", "refusal": "msg", "tool": "fc"}


class Answer:
    """One response; the same id and settings in each of its states."""

    def __init__(self, call: Call, model: str) -> None:
        given = call.original or {}
        self._settings = {name: _repeated(given.get(name), default) for name, default in _DEFAULTS.items()}
        self._identity = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model or call.requested_model,
        }
        self._tells_secrets = b"reasoning.encrypted_content" in bytes(given.get("include", b""))
        self.summarises = _asks_for_summary(given)
        self._names: dict[int, str] = {}

    def begun(self) -> Json:
        return self._state("in_progress")

    def ended(self, row: list[Part], finish: str | None, usage: Usage | None) -> Json:
        """With all parts of the answer; where it was cut, the last one is incomplete."""
        reason = UNFINISHED.get(finish or "")
        status = "completed" if reason is None else "incomplete"
        output = [self.item(part, "completed") for part in row[:-1]] + [self.item(part, status) for part in row[-1:]]
        ending: Json = {"output": output, "usage": usage_object(usage)}
        if reason is not None:
            ending["incomplete_details"] = {"reason": reason}
        else:
            ending["completed_at"] = int(time.time())
        return self._state(status) | ending

    def failed(self, row: list[Part], error: ApiError) -> Json:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        output = [self.item(part, "incomplete") for part in row]
        return self._state("failed") | {"output": output, "error": {"code": code, "message": error.message}}

    def item_id(self, part: Part) -> str:
        if part.index not in self._names:
            self._names[part.index] = f"{_PREFIXES[part.kind]}_{secrets.token_hex(24)}"
        return self._names[part.index]

    def item(self, part: Part, status: str) -> Json:
        """A part as an item of `output`; one that is in progress has no content yet."""
        content = [] if status == "in_progress" else [self.content(part)]
        item: Json = {"id": self.item_id(part), "status": status}
        if part.kind == "tool":
            part.id = part.id or f"call_{secrets.token_hex(12)}"
            arguments = part.text if content else ""
            return item | {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": arguments}
        if part.kind in ("text", "refusal"):
            return item | {"type": "message", "role": "assistant", "content": content}
        item |= {"type": "reasoning", "summary": []}
        if part.kind == "thinking":
            item["summary" if self.summarises else "content"] = content
        if self._tells_secrets:
            item["encrypted_content"] = encrypted(part) if content else None
        return item

    def content(self, part: Part) -> Json:
        """What is in an item that is no call."""
        said = part.text
        if part.kind == "text":
            return {"type": "output_text", "annotations": [], "logprobs": part.logprobs, "text": said}
        if part.kind == "refusal":
            return {"type": "refusal", "refusal": said}
        return {"type": "summary_text" if self.summarises else "reasoning_text", "text": said}

    def _state(self, status: str) -> Json:
        nothing: Json = {"error": None, "incomplete_details": None, "output": [], "usage": None}
        memory: Json = {"background": False, "previous_response_id": None, "store": False}
        return {**self._identity, "status": status, **nothing, **memory, **self._settings}


def _repeated(given: msgspec.Raw | None, default: Any) -> Any:
    """A setting without the caller's line breaks, which an event must not have."""
    if given is None or bytes(given) == b"null":
        return default
    return msgspec.Raw(msgspec.json.format(bytes(given), indent=-1))


class _Reasoning(msgspec.Struct):
    summary: Any = None
    generate_summary: Any = None


def _asks_for_summary(given: dict[str, msgspec.Raw]) -> bool:
    reasoning = msgspec.json.decode(given.get("reasoning", b"null"), type=_Reasoning | None) or _Reasoning()
    return bool(reasoning.summary or reasoning.generate_summary)


def usage_object(usage: Usage | None) -> Json | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
