"""What an upstream's bytes mean: of each frame the facts that count, read once; its bytes stay as they came."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from engine.protocol import Account
from gateway.upstreams import surrogates
from gateway.upstreams.characters import characters, in_a_piece
from gateway.upstreams.usage import Usage, read_usage

DONE = b"data: [DONE]\n\n"
MOST_IN_ACCOUNT = 2**31 - 1
"""No request of an engine counts or lasts so much, and the ledger's narrowest column holds it."""


class MalformedError(Exception):
    """The upstream sent something that is not an answer in its dialect."""


class Frame(msgspec.Struct, gc=False):
    """One chunk of a stream, or a whole reply, as OpenAI chat (text completions and embeddings use the same class)."""

    raw: bytes
    """Its JSON as it came, or translated to OpenAI's; decode it for what is not here."""
    has_choices: bool = False
    """It has choices; of embeddings, their vectors."""
    finish_reason: str | None = None
    """Of its first choice that has one."""
    characters: int = 0
    """Of generated text, reasoning and tool calls in it."""
    usage: Usage | None = None
    account: Account | None = None
    """The engine's own, never shown to a caller."""
    has_account: bool = False
    """There is one in `raw`, whether or not it can be read."""
    error: str | None = None
    odd: str | None = None
    """What was odd in the counts that it reports."""
    served_standard: bool = False
    """It says that it was served at the standard tier, which need not be what was asked."""
    plain: bool = False
    """Nothing in `raw` has to be hidden from the caller: no top-level `usage` or `farthing`, not even a null."""
    native: bytes | None = None
    """The upstream's own event, whole, where the upstream speaks the caller's dialect and that is not OpenAI's."""


class Decoder(Protocol):
    """Reads one reply of one upstream; may keep state between its events."""

    ended: bool
    """The stream's own last event has been seen ([DONE], message_stop): what follows is not part of the answer."""

    def event(self, name: bytes | None, data: bytes) -> Sequence[Frame]:
        """Frames in one server-sent event: none, one or more. Raises MalformedError."""
        ...

    def whole(self, body: bytes) -> Frame:
        """A reply that is no stream. Raises MalformedError."""
        ...


class UsageDialect(Protocol):
    """How an upstream reports counts: cached, written and reasoning tokens inside the totals or beside them."""

    def normalise(self, raw: bytes) -> tuple[Usage | None, str | None]:
        """(usage as OpenAI has it, what was odd in it) of the JSON of a `usage` field, which may be null."""
        ...


class OpenAIUsage:
    def normalise(self, raw: bytes) -> tuple[Usage | None, str | None]:
        return read_usage(raw)


class ChatDecoder:
    """OpenAI-compatible replies: chat completions, text completions and embeddings."""

    def __init__(self, usage_dialect: UsageDialect | None = None) -> None:
        self.ended = False
        self._usage = usage_dialect or OpenAIUsage()

    def event(self, name: bytes | None, data: bytes) -> Sequence[Frame]:
        if data == b"[DONE]":
            self.ended = True
            return ()
        return (self.whole(data),)

    def whole(self, body: bytes) -> Frame:
        try:
            facts = surrogates.decode(_FACTS, body)
            finish: str | None = None
            said = 0
            for choice in facts.choices or ():
                finish = finish or choice.finish_reason
                said += in_a_piece(_said(choice))
            plain = not facts.usage and not facts.farthing
            frame = Frame(body, bool(facts.choices), finish, said, plain=plain)
            if not plain or facts.data or facts.service_tier or facts.error is not None:  # seldom, in mid-stream
                self._take_more(frame, facts)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedError(f"it sent something that is not an answer: {error}") from error
        return frame

    def _take_more(self, frame: Frame, facts: "_Facts") -> None:
        if facts.usage:
            frame.usage, frame.odd = self._usage.normalise(bytes(facts.usage))
        if facts.farthing:
            frame.has_account = True
            _take_account(frame, bytes(facts.farthing))
        frame.has_choices |= _is_filled(facts.data)
        frame.served_standard = bytes(facts.service_tier) == b'"default"'
        frame.error = None if facts.error is None else error_text(facts.error)


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: msgspec.Raw = msgspec.Raw()


class _ToolCall(msgspec.Struct, gc=False):
    function: _Function | None = None


class _Text(msgspec.Struct, gc=False):
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by a newer name; an upstream that moves from one to the other sends both."""
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Text | None = None
    message: _Text | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Facts(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    data: msgspec.Raw = msgspec.Raw()
    """Of embeddings."""
    usage: msgspec.Raw = msgspec.Raw()
    farthing: msgspec.Raw = msgspec.Raw()
    service_tier: msgspec.Raw = msgspec.Raw()
    error: Any = None


_FACTS = msgspec.json.Decoder(_Facts)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ACCOUNT = msgspec.json.Decoder(Account | None)


def _is_filled(raw: msgspec.Raw) -> bool:
    """Whether it is an array with something in it."""
    array = bytes(raw)
    return array[:1] == b"[" and array[1:].lstrip() != b"]"


def fields_of(raw: bytes) -> dict[str, msgspec.Raw]:
    """A frame's top level, each field as it came."""
    return surrogates.decode(_FIELDS, raw)


def _take_account(frame: Frame, raw: bytes) -> None:
    """An account that is not what it should be is no reason to lose a good answer."""
    odd = None
    try:
        account = _ACCOUNT.decode(raw)
    except msgspec.ValidationError as error:
        account, odd = None, f"farthing: {error}"
    if account is not None and not _possible(account):
        account, odd = None, "farthing has a number that cannot be right"
    frame.account = account
    frame.odd = "; ".join(words for words in (frame.odd, odd) if words) or None


def _possible(account: Account) -> bool:
    return all(number is None or 0 <= number <= MOST_IN_ACCOUNT for number in msgspec.structs.astuple(account))


def _said(choice: _Choice) -> int:
    text = choice.delta or choice.message
    if text is None:
        return characters(choice.text or "")
    content = text.content
    size = characters(content) if isinstance(content, str) else _part_characters(content)
    if thought := text.reasoning_content or text.reasoning:
        size += characters(thought)
    if text.refusal:
        size += characters(text.refusal)
    for call in text.tool_calls or ():
        if call.function is not None:
            size += len(call.function.name or "") + max(len(bytes(call.function.arguments)) - 2, 0)
    return size


def _part_characters(parts: list[Any] | None) -> int:
    if not parts:
        return 0
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return sum(characters(text) for text in texts if isinstance(text, str))


class _Error(msgspec.Struct):
    error: Any = None


def error_text(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def error_message(body: bytes) -> str:
    """The sentence in an upstream's error body, or the start of whatever it sent."""
    start = body[:200].decode(errors="replace")
    try:
        error = msgspec.json.decode(body, type=_Error).error
    except (msgspec.DecodeError, RecursionError):
        return start
    return start if error is None else error_text(error) or start
