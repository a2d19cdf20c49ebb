"""What the engine answers: OpenAI's chat and text completion objects, whole or as server-sent events."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.protocol import Account, CompletionTokensDetails, ErrorBody, PromptTokensDetails, Usage

ReplyKind = Literal["chat", "text"]

DONE = b"data: [DONE]\n\n"


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: Message
    finish_reason: str
    logprobs: None = None


class Delta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: None = None


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer or one chunk. `usage` and `farthing` are left out when unset."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice] | list[ChunkChoice] | list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    farthing: Account | UnsetType = UNSET


def usage_so_far(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptTokensDetails(cached_tokens),
        CompletionTokensDetails(0),
    )


def event(value: Reply | ErrorBody) -> bytes:
    """One server-sent event. JSON never contains a raw line break, so one `data:` line is enough."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


class ReplyWriter:
    """Writes one request's answer as chat or as text completion."""

    def __init__(self, kind: ReplyKind, request_id: str, model: str, created: int) -> None:
        self.chat = kind == "chat"
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{request_id}"
        self.model = model
        self.created = created

    def whole(self, text: str, finish_reason: str, account: Account) -> bytes:
        """The answer to a request that does not stream, as JSON."""
        choices: list[ChatChoice] | list[TextChoice]
        if self.chat:
            choices = [ChatChoice(0, Message("assistant", text), finish_reason)]
        else:
            choices = [TextChoice(0, text, finish_reason)]
        name = "chat.completion" if self.chat else "text_completion"
        return msgspec.json.encode(self._reply(name, choices, Usage.of(account), account))

    def role(self, usage: Usage | UnsetType | None) -> bytes:
        """The chunk that opens a chat stream."""
        return event(self._chunk([ChunkChoice(0, Delta("assistant", ""))], usage))

    def text(self, text: str, usage: Usage | UnsetType | None) -> bytes:
        if self.chat:
            return event(self._chunk([ChunkChoice(0, Delta(content=text))], usage))
        return event(self._chunk([TextChoice(0, text)], usage))

    def finish(self, finish_reason: str, usage: Usage | UnsetType | None) -> bytes:
        """The last chunk with a choice; it carries no text."""
        if self.chat:
            return event(self._chunk([ChunkChoice(0, Delta(), finish_reason)], usage))
        return event(self._chunk([TextChoice(0, "", finish_reason)], usage))

    def usage(self, account: Account) -> bytes:
        """The extra chunk that `include_usage` asks for."""
        return event(self._chunk([], Usage.of(account), account))

    def _chunk(
        self,
        choices: list[ChunkChoice] | list[TextChoice],
        usage: Usage | UnsetType | None,
        account: Account | UnsetType = UNSET,
    ) -> Reply:
        return self._reply("chat.completion.chunk" if self.chat else "text_completion", choices, usage, account)

    def _reply(
        self,
        name: str,
        choices: list[ChatChoice] | list[ChunkChoice] | list[TextChoice],
        usage: Usage | UnsetType | None,
        account: Account | UnsetType,
    ) -> Reply:
        return Reply(
            id=self.id,
            object=name,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            farthing=account,
        )
