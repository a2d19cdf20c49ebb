"""One request in the gateway's own words, whatever wire format it came in."""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from gateway.errors import ApiError

TEXT_LIMIT = 256
Kind = Literal["chat", "completion", "embedding"]


class Unsaid(NamedTuple):
    """Something in the caller's own body that OpenAI chat has no words for, so that it is missing in `Call.fields`."""

    name: str
    """As a caller finds it: `container`, `tools[2] (web_search_20250305)`. It may stand in a header: see `plain`."""
    droppable: bool
    """A parameter, which a route may drop; what is part of the conversation never is."""


class Call(msgspec.Struct, frozen=True):
    """A decoded request. `fields` is the top level of an OpenAI body as raw JSON: what we do not know is forwarded."""

    api: str
    """The surface it came by: chat.completions, completions, embeddings, responses, messages or count_tokens."""
    requested_model: str
    messages: list[dict[str, Any]]
    stream: bool
    include_usage: bool
    """The caller asked for the usage chunk."""
    continuous_usage: bool
    """The caller asked for usage on every chunk."""
    max_output: int | None
    """Tokens, for each of `choices`; None when the caller set no limit."""
    choices: int
    has_tools: bool
    tags: dict[str, str]
    fields: dict[str, msgspec.Raw]
    kind: Kind = "chat"
    """Which endpoint of an upstream it needs."""
    original: dict[str, msgspec.Raw] | None = None
    """The caller's own body where `fields` is a translation of it: for an upstream that speaks the caller's dialect."""
    priority: int | None = None
    """For upstreams of kind engine: larger runs later. Set by the gateway, for lines of a batch and by tier."""
    unsaid: tuple[Unsaid, ...] = ()
    """What the translation could not carry over: only an upstream that gets `original` honours it."""
    betas: str | None = None
    """Features under trial that an Anthropic upstream shall switch on, as its callers list them in a header."""

    def leave_unsaid(self, drop: bool) -> tuple[str, ...]:
        """Names of what an upstream that gets `fields` does without. Raises ApiError 400 where that is not allowed."""
        for name, droppable in self.unsaid:
            if not (drop and droppable):
                text = f"The upstream of this model cannot honour {name}. Leave it out, or choose another model."
                raise ApiError(400, "unsupported_parameter", text, param=name.partition(" ")[0])
        return tuple(name for name, _ in self.unsaid)

    def texts(self) -> Iterator[tuple[str, str]]:
        """(role, text) of every text part of the conversation, in order."""
        for message in self.messages:
            role = str(message.get("role", ""))
            content = message.get("content")
            if isinstance(content, str):
                yield role, content
            elif isinstance(content, list):
                for part in content:
                    if isinstance(part, dict) and isinstance(part.get("text"), str):
                        yield role, part["text"]

    @property
    def images(self) -> int:
        """In the whole conversation: what a price for each image multiplies."""
        found = 0
        for message in self.messages:  # plain loops: every request comes by here
            content = message.get("content")
            if isinstance(content, list):
                for part in content:
                    found += isinstance(part, dict) and part.get("type") == "image_url"
        return found

    def has_media(self) -> bool:
        """Whether a part of any message is something else than text, or something is in the caller's own body only."""
        if self.unsaid:
            return True
        for message in self.messages:
            content = message.get("content")
            if isinstance(content, list):
                for part in content:
                    if not isinstance(part, dict) or part.get("type") != "text":
                        return True
        return False


def plain(text: object) -> str:
    """Caller-given text as part of a name: short, and of characters that a header can carry."""
    return re.sub(r"[^\w.-]", "?", str(text), flags=re.ASCII)[:40]


def storable(text: str) -> str:
    """Caller-given text as the ledger may keep it: short, and without NUL, which PostgreSQL's text cannot hold."""
    return text.replace("\0", "�")[:TEXT_LIMIT]
