"""`usage` as upstreams report it: the counts the gateway bills by, read leniently and never trusted blindly."""

import contextlib
from typing import Any

import msgspec

from billing.records import TokenClasses
from billing.usage import token_classes


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """Counts as OpenAI has them: cached and written tokens are inside the prompt, reasoning inside the completion.

    The details can be missing or null; `cache_write_tokens` among them is an extension.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @classmethod
    def of(cls, prompt: int, completion: int, *, cached: int = 0, written: int = 0, reasoning: int = 0) -> "Usage":
        """Usage from its five counts; the total is their sum."""
        details = _PromptDetails(cached, written)
        return cls(prompt, completion, prompt + completion, details, _CompletionDetails(reasoning))

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0

    @property
    def cache_write_tokens(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cache_write_tokens) or 0

    @property
    def reasoning_tokens(self) -> int:
        return (self.completion_tokens_details and self.completion_tokens_details.reasoning_tokens) or 0


def classes_of(usage: Usage) -> tuple[TokenClasses, str | None]:
    """The five disjoint classes of what was reported, and what was inconsistent in it."""
    return token_classes(
        usage.prompt_tokens,
        usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        total_tokens=usage.total_tokens,
    )


_DECODER = msgspec.json.Decoder(Usage | None)


def read_usage(raw: bytes) -> tuple[Usage | None, str | None]:
    """(usage, what was odd in it) of OpenAI's `usage` object in JSON.

    Counts may be whole floats. None where the JSON is null or the two main counts are not both there; an embedding has
    no completion, which its total confirms.
    """
    try:
        usage = _DECODER.decode(raw)
        if usage is None or usage.completion_tokens or _is_complete(usage, raw):
            return usage, None
        return None, "usage has no completion_tokens"
    except msgspec.ValidationError as error:
        odd = f"usage: {error}"
    whole = _whole(msgspec.json.decode(raw))
    for part in (whole, _without_details(whole)):
        with contextlib.suppress(msgspec.ValidationError):
            usage = msgspec.convert(part, Usage)
            return (usage if _is_complete(usage, raw) else None), odd
    return None, odd


def _is_complete(usage: Usage, raw: bytes) -> bool:
    return usage.total_tokens == usage.prompt_tokens or b'"completion_tokens"' in raw


def _whole(value: Any) -> Any:
    """The value with each whole float in it as an integer."""
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_details(value: Any) -> Any:
    names = ("prompt_tokens", "completion_tokens")
    return {name: value[name] for name in names if name in value} if isinstance(value, dict) else value
