"""Chat frames as events of Anthropic's stream; those of an upstream that speaks it itself go through as they came."""

from collections.abc import Iterable, Sequence

import msgspec

from gateway.api.chunk import Choice, Chunk, read_chunk
from gateway.api.events import event
from gateway.api.messages_output import delta, empty_block, error_object, new_message, stop, usage_object
from gateway.api.parts import Parts, Step
from gateway.errors import ApiError
from gateway.upstreams.frames import Frame
from gateway.upstreams.usage import Usage

_STOPPED = event({"type": "message_stop"})


class MessagesWriter:
    needs_prompt_count = True

    def __init__(self, stop_sequences: list[str], show_thinking: bool) -> None:
        self.prompt_tokens: int | None = None
        self._stop_sequences = stop_sequences
        self._parts = Parts(show_thinking)
        self._started = False
        self._native = _NativeBlocks()
        self._last: Choice | None = None

    def write(self, frame: Frame) -> bytes:
        if frame.native is not None:
            self._started = True
            self._native.saw(frame.native)
            return frame.native
        chunk = read_chunk(frame.raw)
        if chunk.choice is None:
            return b""
        self._last = chunk.choice
        return self._start(chunk, frame.usage) + self._events(self._parts.take(chunk.choice.said))

    def end(self, held: Sequence[Frame]) -> bytes:
        return b"".join(self.write(frame) for frame in held)

    def finish(self, usage: Usage) -> bytes:
        if self._native.stopped:
            return _STOPPED
        return self._start(Chunk(), usage) + self._end(usage) + _STOPPED

    def fail(self, error: ApiError) -> bytes:
        return event(error_object(error))

    def _start(self, chunk: Chunk, usage: Usage | None) -> bytes:
        if self._started:
            return b""
        self._started = True
        counts = usage_object(usage, self.prompt_tokens)
        return event({"type": "message_start", "message": new_message(chunk, counts)})

    def _end(self, usage: Usage) -> bytes:
        closing = self._native.close() + self._events(self._parts.end())
        why = stop(self._last, self._parts, self._stop_sequences)
        counts = usage_object(usage)
        return closing + event({"type": "message_delta", "delta": why, "usage": counts})

    def _events(self, steps: Iterable[Step]) -> bytes:
        return b"".join(self._step_events(step) for step in steps)

    def _step_events(self, step: Step) -> bytes:
        part, index = step.part, step.part.index + self._native.count
        if step.what == "open":
            return event({"type": "content_block_start", "index": index, "content_block": empty_block(part)})
        if step.what == "grow":
            return event({"type": "content_block_delta", "index": index, "delta": delta(part, step.text)})
        ending = event({"type": "content_block_stop", "index": index})
        if part.kind == "thinking" and part.signature:
            signed = {"type": "signature_delta", "signature": part.signature}
            return event({"type": "content_block_delta", "index": index, "delta": signed}) + ending
        return ending


class _Indexed(msgspec.Struct):
    index: int = 0


class _NativeBlocks:
    """Which block an upstream's own events have left open, for the case that the gateway ends the answer."""

    def __init__(self) -> None:
        self.count = 0
        self.stopped = False
        self._open: int | None = None

    def saw(self, native: bytes) -> None:
        name, _, data = native.partition(b"\n")
        if name == b"event: content_block_start":
            self._open = msgspec.json.decode(data.removeprefix(b"data: "), type=_Indexed).index
            self.count = max(self.count, self._open + 1)
        elif name == b"event: content_block_stop":
            self._open = None
        elif name == b"event: message_delta":
            self.stopped = True

    def close(self) -> bytes:
        index, self._open = self._open, None
        return b"" if index is None else event({"type": "content_block_stop", "index": index})
