"""Chat answers as upstreams send them: what the gateway reads in a frame or a whole reply, and what it hides.

Every JSON object's top level is kept as raw text, so what we do not know passes through byte for byte.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.protocol import Account

DONE = b"data: [DONE]\n\n"
_NULL = msgspec.Raw(b"null")
MOST_IN_ACCOUNT = 2**31 - 1
"""No request of an engine counts or lasts so much, and the ledger's narrowest column holds it."""

_NO_CHOICES = msgspec.Raw(b"[]")


class MalformedError(Exception):
    """The upstream sent something that is not a chat answer."""


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """`usage` as any upstream may send it: the details can be missing or null."""

    prompt_tokens: int
    completion_tokens: int
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


class _OddFacts(msgspec.Struct):
    """The same where `usage` or `farthing` is not what it should be: no reason to lose a good answer."""

    choices: list[_Choice] = []
    usage: Any = None
    farthing: Any = None
    error: Any = None

    def facts(self) -> tuple[_Facts, str | None]:
        """What can be read of it, and what was odd."""
        usage, odd_usage = _odd_usage(self.usage)
        account, odd_account = _odd_account(self.farthing)
        odd = "; ".join(words for words in (odd_usage, odd_account) if words)
        return _Facts(self.choices, usage, account, self.error), odd or None


@dataclass(slots=True)
class Frame:
    """One frame of a stream, or a whole reply. `characters` counts the generated text in it; `odd`: in its counts."""

    fields: dict[str, msgspec.Raw]
    has_choices: bool
    finish_reason: str | None
    characters: int
    usage: Usage | None
    account: Account | None
    error: str | None
    odd: str | None = None

    @classmethod
    def decode(cls, data: bytes) -> "Frame":
        """Raises MalformedError."""
        try:
            facts, odd = _facts(data)
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
            odd=odd,
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


def _facts(data: bytes) -> tuple[_Facts, str | None]:
    try:
        facts, odd = msgspec.json.decode(data, type=_Facts), None
    except msgspec.ValidationError:
        facts, odd = msgspec.json.decode(data, type=_OddFacts).facts()
    if facts.farthing is not None and not _possible(facts.farthing):
        facts.farthing, odd = None, "farthing has a number that cannot be right"
    return facts, odd


def _odd_usage(value: Any) -> tuple[Usage | None, str | None]:
    """Usage in which counts may be whole floats; None where the two main ones are not both there."""
    if value is None:
        return None, None
    try:
        return msgspec.convert(value, Usage), None
    except msgspec.ValidationError as error:
        odd = f"usage: {error}"
    whole = _whole(value)
    for part in (whole, _without_details(whole)):
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(part, Usage), odd
    return None, odd


def _whole(value: Any) -> Any:
    """The value with each whole float in it as an integer."""
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_details(value: Any) -> Any:
    names = ("prompt_tokens", "completion_tokens")
    return {name: value.get(name) for name in names} if isinstance(value, dict) else value


def _odd_account(value: Any) -> tuple[Account | None, str | None]:
    if value is None:
        return None, None
    try:
        return msgspec.convert(value, Account), None
    except msgspec.ValidationError as error:
        return None, f"farthing: {error}"


def _possible(account: Account) -> bool:
    return all(number is None or 0 <= number <= MOST_IN_ACCOUNT for number in msgspec.structs.astuple(account))


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
