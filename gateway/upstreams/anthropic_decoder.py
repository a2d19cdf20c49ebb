"""Anthropic's replies as OpenAI chat frames; for a caller who speaks its dialect each keeps the event as it came."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.upstreams import surrogates
from gateway.upstreams.anthropic_message import detail, finish, said_in
from gateway.upstreams.anthropic_usage import Counts
from gateway.upstreams.characters import characters, in_a_piece
from gateway.upstreams.frames import Frame, MalformedError, error_text

Json = dict[str, Any]


class _Message(msgspec.Struct):
    type: str = ""
    id: str = ""
    model: str = ""
    content: list[Json] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Json | None = None


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    message: _Message | None = None
    content_block: Json | None = None
    delta: Json | None = None
    usage: Json | None = None
    error: Any = None


class _Block(msgspec.Struct):
    """An open content block: its kind, the call's place among calls, and whether it has sent text."""

    kind: str
    call: int = 0
    grown: bool = False
    thought: bytearray = msgspec.field(default_factory=bytearray)


_EVENT = msgspec.json.Decoder(_Event)
_MESSAGE = msgspec.json.Decoder(_Message)


class AnthropicDecoder:
    def __init__(self, native: bool) -> None:
        self.ended = False
        self._native = native
        self._message = _Message()
        self._created = int(time.time())
        self._counts = Counts()
        self._blocks: dict[int, _Block] = {}
        self._calls = 0
        self._thoughts = 0

    def event(self, name: bytes | None, data: bytes) -> Sequence[Frame]:
        try:
            event = surrogates.decode(_EVENT, data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise MalformedError(f"it sent something that is not an event of Anthropic's: {error}") from error
        if event.type == "message_stop":
            self.ended = True
        if event.type in ("message_stop", "ping"):
            return ()
        frame = self._frame(event)
        if self._native:
            frame = frame or Frame(b"{}", plain=True)
            line = data.replace(b"\n", b" ").replace(b"\r", b" ")  # JSON has them between its values only
            frame.native = b"event: %s\ndata: %s\n\n" % (event.type.encode(), line)
        return () if frame is None else (frame,)

    def whole(self, body: bytes) -> Frame:
        try:
            message = surrogates.decode(_MESSAGE, body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise MalformedError(f"it sent something that is not an answer of Anthropic's: {error}") from error
        if message.type != "message" or not (message.content or message.stop_reason):
            raise MalformedError("it sent something that is not an answer of Anthropic's")
        self._message = message
        usage, odd = self._counts.take(message.usage)
        said, length = said_in(message.content)
        ending = finish(message.stop_reason, message.stop_sequence)
        choice = {"index": 0, "message": {"role": "assistant", **said}, "logprobs": None, **ending}
        raw = self._object("chat.completion", [choice]) | {"usage": usage}
        frame = Frame(msgspec.json.encode(raw), True, ending["finish_reason"], length, usage, odd=odd)
        frame.native = body if self._native else None
        return frame

    def _frame(self, event: _Event) -> Frame | None:
        """What an event says in OpenAI's words; None where it says nothing there."""
        if event.type == "error":
            return Frame(b"{}", error=error_text(event.error))
        if event.type == "message_start" and event.message is not None:
            return self._start(event.message)
        if event.type == "message_delta":
            return self._end(event.delta or {}, event.usage)
        if event.type == "content_block_start" and event.content_block is not None:
            return self._open(event.index, event.content_block)
        block = self._blocks.get(event.index)
        if block is not None and event.type == "content_block_delta" and event.delta is not None:
            return self._grow(block, event.delta)
        if block is not None and event.type == "content_block_stop":
            return self._close(self._blocks.pop(event.index))
        return None

    def _start(self, message: _Message) -> Frame:
        self._message = message
        usage, odd = self._counts.take(message.usage)
        frame = self._said({"role": "assistant", "content": ""}, 0)
        frame.usage, frame.odd = usage, odd
        return frame

    def _end(self, delta: Json, counts: Json | None) -> Frame:
        usage, odd = self._counts.take(counts)
        ending = finish(delta.get("stop_reason"), delta.get("stop_sequence"))
        raw = self._object("chat.completion.chunk", [{"index": 0, "delta": {}, **ending}]) | {"usage": usage}
        return Frame(msgspec.json.encode(raw), True, ending["finish_reason"], 0, usage, odd=odd)

    def _open(self, index: int, start: Json) -> Frame | None:
        kind = str(start.get("type"))
        block = self._blocks[index] = _Block(kind)
        if kind == "tool_use":
            block.call, self._calls = self._calls, self._calls + 1
            arguments = msgspec.json.encode(start["input"]).decode() if start.get("input") else ""
            block.grown = bool(arguments)
            name = str(start.get("name", ""))
            function = {"name": name, "arguments": arguments}
            call = {"index": block.call, "id": start.get("id"), "type": "function", "function": function}
            return self._said({"tool_calls": [call]}, characters(name + arguments))
        if kind == "redacted_thinking":
            return self._said({"reasoning_details": [self._detail("encrypted", data=start.get("data"))]}, 0)
        grow = _FIRST.get(kind)
        return self._grow(block, grow(start)) if grow and start.get(kind) else None

    def _grow(self, block: _Block, delta: Json) -> Frame | None:
        kind = delta.get("type")
        if kind == "text_delta":
            text = str(delta.get("text", ""))
            return self._said({"content": text}, characters(text))
        if kind == "thinking_delta":
            text = str(delta.get("thinking", ""))
            block.thought += text.encode()
            return self._said({"reasoning_content": text}, characters(text))
        if kind == "signature_delta":
            signed = self._detail("text", text=block.thought.decode(), signature=delta.get("signature"))
            return self._said({"reasoning_details": [signed]}, 0)
        text = str(delta.get("partial_json", ""))
        if kind != "input_json_delta" or block.kind != "tool_use" or not text:
            return None
        block.grown = True
        return self._said({"tool_calls": [{"index": block.call, "function": {"arguments": text}}]}, characters(text))

    def _close(self, block: _Block) -> Frame | None:
        """A call without arguments sends none, where OpenAI's has those of an empty object."""
        if block.kind != "tool_use" or block.grown:
            return None
        return self._said({"tool_calls": [{"index": block.call, "function": {"arguments": "{}"}}]}, 2)

    def _detail(self, kind: str, **fields: Any) -> Json:
        index, self._thoughts = self._thoughts, self._thoughts + 1
        return detail(kind, index, **fields)

    def _said(self, delta: Json, length: int) -> Frame:
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        raw = msgspec.json.encode(self._object("chat.completion.chunk", [choice]))
        return Frame(raw, has_choices=True, characters=in_a_piece(length), plain=True)

    def _object(self, kind: str, choices: list[Json]) -> Json:
        identity = {"id": self._message.id, "object": kind, "created": self._created, "model": self._message.model}
        return identity | {"choices": choices}


_FIRST: dict[str, Callable[[Json], Json]] = {
    "text": lambda start: {"type": "text_delta", "text": start["text"]},
    "thinking": lambda start: {"type": "thinking_delta", "thinking": start["thinking"]},
}
"""A block that begins with text already, as the delta that it might have come in."""
