"""OpenAI chat replies in full, whole or in chunks, for the surfaces that say the same in other words."""

from typing import Any

import msgspec

from gateway.upstreams import surrogates
from gateway.upstreams.frames import MalformedError


class Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None
    """JSON as text, or the next part of it; some upstreams send the object itself."""

    @property
    def text(self) -> str:
        given = self.arguments
        if given is None or isinstance(given, str):
            return given or ""
        return msgspec.json.encode(given).decode()


class ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: Function = msgspec.field(default_factory=Function)


class ReasoningDetail(msgspec.Struct):
    """What a model wants to have back in the next request, unread: a signature of its reasoning, or all of it."""

    signature: str | None = None
    data: str | None = None


class Delta(msgspec.Struct):
    """What one chunk adds to a choice; a whole reply's message has the same form."""

    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by another name; an upstream may send both."""
    reasoning_details: list[ReasoningDetail] | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(str(part.get("text", "")) for part in self.content)
        return self.content or ""

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class Logprobs(msgspec.Struct):
    content: list[dict[str, Any]] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    """vLLM: the stop string that ended the answer, or a token's id."""
    matched_stop: Any = None
    """SGLang's name for it."""
    logprobs: Logprobs | None = None

    @property
    def token_logprobs(self) -> list[dict[str, Any]]:
        return (self.logprobs.content if self.logprobs is not None else None) or []

    @property
    def said(self) -> Delta:
        return self.delta or self.message or Delta()

    @property
    def stop_string(self) -> str | None:
        found = self.stop_reason if self.stop_reason is not None else self.matched_stop
        return found if isinstance(found, str) else None


class Chunk(msgspec.Struct):
    model: str = ""
    choices: list[Choice] = []

    @property
    def choice(self) -> Choice | None:
        """The first choice: the formats that are not OpenAI's chat have one."""
        return next((choice for choice in self.choices if choice.index == 0), None)


_CHUNK = msgspec.json.Decoder(Chunk)


def read_chunk(raw: bytes) -> Chunk:
    """Raises MalformedError where it is no chat reply."""
    try:
        return surrogates.decode(_CHUNK, raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(f"it sent something that is not a chat answer: {error}") from error
