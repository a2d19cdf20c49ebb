"""A surface: one wire format that callers speak, between its bytes and the gateway's own words."""

from collections.abc import Sequence
from typing import Protocol

from gateway.call import Call
from gateway.errors import ApiError
from gateway.upstreams.frames import Frame
from gateway.upstreams.usage import Usage


class StreamWriter(Protocol):
    """Turns one answer's frames into the caller's server-sent events; b"" where a frame sends none."""

    needs_prompt_count: bool
    """Whether its first event carries the prompt's size. The relay then sets `prompt_tokens` before the first frame."""
    prompt_tokens: int | None
    """The gateway's own count of the prompt. The first frame's usage, where it has one, is better."""

    def write(self, frame: Frame) -> bytes:
        """Events for a frame in mid-answer."""
        ...

    def end(self, held: Sequence[Frame]) -> bytes:
        """Events for the frames that end a choice and those with usage alone, in the order they came.

        Its row is not written yet, so that what cannot be read still counts as a failure. A frame that the gateway
        made (the answer was cut) has no `native`, whatever came before.
        """
        ...

    def finish(self, usage: Usage) -> bytes:
        """What comes last, once the row is written. `usage`: as settled, in the end the caller's truth."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """The error in mid-stream, in this dialect, and what ends the stream."""
        ...


class Surface(Protocol):
    """`api` is the name in the ledger and in a key's allowed routes."""

    api: str

    def decode(self, body: bytes) -> Call:
        """Raises ApiError 400 naming what is wrong and where."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The body of an answer that is an error."""
        ...

    def whole(self, call: Call, reply: Frame) -> bytes:
        """The body of an answer that is no stream. The account in `reply.raw` is not the caller's."""
        ...

    def writer(self, call: Call) -> StreamWriter: ...
