"""What the engine answers: OpenAI's chat and text completion objects."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.api_logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs
from engine.protocol import Account, CompletionTokensDetails, ErrorBody, PromptTokensDetails, Usage

ReplyKind = Literal["chat", "text"]

DONE = b"data: [DONE]\n\n"


class Function(msgspec.Struct, frozen=True):
    """`arguments` is JSON; of a delta, its next part."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    index: int | UnsetType = UNSET
    """Set in deltas only; `id` and `type` in the first delta of a call."""
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: Message
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


Choice = ChatChoice | ChunkChoice | TextChoice


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer or one chunk. `usage`, `farthing` and `prompt_logprobs` are left out when unset."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    farthing: Account | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Vector(msgspec.Struct, frozen=True):
    index: int
    embedding: list[float] | str
    """The numbers, or their float32 bytes in base64, little end first."""
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Vector]
    model: str
    usage: EmbeddingUsage
    farthing: Account


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
