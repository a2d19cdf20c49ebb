"""Chat answers as upstreams send them: what the gateway reads in a frame or a whole reply, and what it hides.

Every JSON object's top level is kept as raw text, so what we do not know passes through byte for byte.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine.protocol import Account

DONE = b"data: [DONE]\n\n"
_NULL = msgspec.Raw(b"null")
_NO_CHOICES = msgspec.Raw(b"[]")


class MalformedError(Exception):
    """The upstream sent something that is not a chat answer."""


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """`usage` as any upstream may send it: the details can be missing or null."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0

    @property
    def reasoning_tokens(self) -> int:
        return (self.completion_tokens_details and self.completion_tokens_details.reasoning_tokens) or 0


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    delta: _Text | None = None
    message: _Text | None = None
    finish_reason: str | None = None


class _Facts(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    farthing: Account | None = None
    error: Any = None


@dataclass(slots=True)
class Frame:
    """One frame of a stream, or a whole reply. `characters` counts the generated text in it."""

    fields: dict[str, msgspec.Raw]
    has_choices: bool
    finish_reason: str | None
    characters: int
    usage: Usage | None
    account: Account | None
    error: str | None

    @classmethod
    def decode(cls, data: bytes) -> "Frame":
        """Raises MalformedError."""
        try:
            facts = msgspec.json.decode(data, type=_Facts)
            fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedError(f"it sent something that is not a chat answer: {error}") from error
        reasons = [choice.finish_reason for choice in facts.choices if choice.finish_reason]
        return cls(
            fields=fields,
            has_choices=bool(facts.choices),
            finish_reason=reasons[0] if reasons else None,
            characters=sum(_characters(choice) for choice in facts.choices),
            usage=facts.usage,
            account=facts.farthing,
            error=_error_text(facts.error),
        )

    def stream_bytes(self, *, show_usage: bool, null_usage: bool) -> bytes:
        """The frame for the caller, without the account; usage as it came, null (the caller gets it last), or gone."""
        self.fields.pop("farthing", None)
        if not show_usage and self.fields.pop("usage", None) is not None and null_usage:
            self.fields["usage"] = _NULL
        return b"data: " + msgspec.json.encode(self.fields) + b"\n\n"

    def usage_only(self) -> "Frame":
        """A usage frame made of this one, for an upstream that reports usage beside its last choice."""
        return Frame({**self.fields, "choices": _NO_CHOICES}, False, None, 0, self.usage, None, None)

    def whole_bytes(self) -> bytes:
        """A whole reply for the caller, the account taken out."""
        self.fields.pop("farthing", None)
        return msgspec.json.encode(self.fields)


def _characters(choice: _Choice) -> int:
    text = choice.delta or choice.message or _Text()
    size = len(text.content or "") + len(text.reasoning_content or "")
    return size + (len(bytes(text.tool_calls)) if text.tool_calls is not None else 0)


def _error_text(error: Any) -> str | None:
    if error is None:
        return None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def error_message(body: bytes) -> str:
    """The sentence in an upstream's error body, or the start of whatever it sent."""
    try:
        return _error_text(msgspec.json.decode(body, type=_Facts).error) or body[:200].decode(errors="replace")
    except (msgspec.DecodeError, RecursionError):
        return body[:200].decode(errors="replace")
