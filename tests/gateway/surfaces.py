"""A surface run as the relay runs it, without a socket; what it writes is read with the vendors' own types."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from gateway.api.surface import Surface
from gateway.call import Call
from gateway.upstreams.frames import ChatDecoder, Decoder, Frame
from gateway.upstreams.sse import EventReader
from gateway.upstreams.usage import Usage


def by_type(union: Any) -> dict[str, type[BaseModel]]:
    """The models of a vendor's union of events, by what their `type` must be."""
    models = get_args(get_args(union)[0])
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in models}


MESSAGE_EVENTS = by_type(RawMessageStreamEvent)
RESPONSE_EVENTS = by_type(ResponseStreamEvent)

USAGE = Usage.of(20, 7, cached=8, written=2, reasoning=3)
"""As an upstream of OpenAI's dialect reports it."""


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    """`more` goes to the choice, `usage` beside it."""
    beside = {"usage": more.pop("usage")} if "usage" in more else {}
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m-1", "choices": [choice]} | beside


def call_chunk(index: int, arguments: str, id: str | None = None, name: str | None = None) -> dict[str, Any]:
    """A fragment of a tool call; the first one has the id and the name."""
    function = {"arguments": arguments} | ({"name": name} if name else {})
    first = {"id": id, "type": "function"} if id else {}
    return chunk({"tool_calls": [{"index": index, **first, "function": function}]})


def chat_stream(*chunks: dict[str, Any]) -> bytes:
    lines = [b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n" for value in chunks]
    return b"".join(lines) + b"data: [DONE]\n\n"


def anthropic_stream(*events: dict[str, Any]) -> bytes:
    return b"".join(
        f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events
    )


def message_start(usage: dict[str, int]) -> dict[str, Any]:
    """The event that an answer of Anthropic's begins with."""
    message: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": []}
    ends = {"stop_reason": None, "stop_sequence": None, "usage": usage}
    return {"type": "message_start", "message": message | ends}


def decoded(surface: Surface, body: dict[str, Any]) -> Call:
    return surface.decode(json.dumps(body).encode())


def fields_of(call: Call) -> dict[str, Any]:
    """The body that an OpenAI-compatible upstream gets."""
    return {name: json.loads(bytes(raw)) for name, raw in call.fields.items()}


def streamed(
    surface: Surface,
    call: Call,
    pieces: Iterable[bytes],
    *,
    decoder: Decoder | None = None,
    usage: Usage = USAGE,
    cut: bool = False,
) -> bytes:
    """What the caller gets for an upstream's stream in `pieces`; `usage` as settled. `cut`: before its own end."""
    writer, reader, decoder = surface.writer(call), EventReader(), decoder or ChatDecoder()
    writer.prompt_tokens = 5
    out, held = b"", []
    for piece in pieces:
        for name, data in reader.feed(piece):
            for frame in decoder.event(name, data):
                assert frame.error is None
                if frame.finish_reason is not None or (frame.usage is not None and not frame.has_choices):
                    held.append(frame)
                else:
                    out += writer.write(frame)
    if cut:
        held = [Frame(json.dumps(chunk({}, "length")).encode(), has_choices=True, finish_reason="length")]
    assert cut or decoder.ended
    return out + writer.end(held) + writer.finish(usage)


def events(stream: bytes) -> list[dict[str, Any]]:
    """The payloads, each of which must be of the type that its event is named by."""
    found = []
    for block in stream.decode().strip("\n").split("\n\n"):
        name, data = block.split("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        found.append(payload)
    return found


def message_of(stream: bytes) -> Message:
    """The message that Anthropic's SDK makes of a stream, each event of which fits its types."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    found = events(stream)
    assert found[-1] == {"type": "message_stop"}
    for event in found:
        parsed: Any = MESSAGE_EVENTS[event["type"]].model_validate(event)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    return Message.model_validate(snapshot.to_dict())


def response_events(stream: bytes) -> list[Any]:
    """The events in OpenAI's types, numbered from 0 without a gap."""
    found: list[Any] = [RESPONSE_EVENTS[event["type"]].model_validate(event) for event in events(stream)]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    return found


def response_of(stream: bytes) -> Response:
    """The response in the last event, after checking that the deltas and the items said the same."""
    found = response_events(stream)
    response: Response = found[-1].response
    assert {event.response.id for event in found if hasattr(event, "response")} == {response.id}
    items = [event.item for event in found if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in items] == [item.to_dict() for item in response.output]
    for index, item in enumerate(response.output):
        said = "".join(event.delta for event in found if _is_delta(event) and event.output_index == index)
        assert said == _text(item)
    return response


def _is_delta(event: Any) -> bool:
    return str(event.type).endswith(".delta")


def _text(item: Any) -> str:
    if item.type == "function_call":
        return str(item.arguments)
    if item.type == "reasoning":
        return "".join(part.text for part in item.content or item.summary)
    return "".join(part.text if part.type == "output_text" else part.refusal for part in item.content)


def whole(message: dict[str, Any], finish: str, usage: Usage | None = USAGE, **more: Any) -> Frame:
    """A whole reply of an OpenAI-compatible upstream, decoded."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, **more}
    reply = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m-1", "choices": [choice]}
    counts = {} if usage is None else {"usage": usage_fields(usage)}
    return ChatDecoder().whole(json.dumps(reply | counts).encode())


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


HELLO = [chunk({"role": "assistant", "content": ""}), chunk({"content": "Hello"}), chunk({}, "stop")]
INTERLEAVED: Sequence[dict[str, Any]] = (
    chunk({"role": "assistant", "content": ""}),
    chunk({"content": "Let me look."}),
    call_chunk(0, "", "call_a", "weather"),
    call_chunk(0, '{"city":'),
    call_chunk(1, "", "call_b", "time"),
    call_chunk(1, '{"zone":'),
    call_chunk(0, '"Oslo"}'),
    call_chunk(1, '"CET"}'),
    chunk({}, "tool_calls"),
)
"""Fragments of two parallel calls, mixed."""
CALLS = [("call_a", "weather", {"city": "Oslo"}), ("call_b", "time", {"zone": "CET"})]
