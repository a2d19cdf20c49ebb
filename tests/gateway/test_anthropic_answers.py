"""Anthropic as an upstream: its answers in OpenAI's words, read by OpenAI's own types."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.api.chat import ChatSurface
from gateway.api.messages import MessagesSurface
from gateway.upstreams.anthropic_decoder import AnthropicDecoder
from gateway.upstreams.characters import CHARACTERS_PER_TOKEN
from gateway.upstreams.frames import Frame, MalformedError
from tests.gateway.surfaces import anthropic_stream, chat_stream, decoded, message_start, streamed

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
USAGE = {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 5, "output_tokens": 1}
START = message_start(USAGE)


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    grown = [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
    opened = {"type": "content_block_start", "index": index, "content_block": start}
    return [opened, *grown, {"type": "content_block_stop", "index": index}]


def end(reason: str, sequence: str | None = None) -> list[dict[str, Any]]:
    delta = {"stop_reason": reason, "stop_sequence": sequence}
    return [{"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9}}, {"type": "message_stop"}]


EVENTS = [
    START,
    {"type": "ping"},
    *block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "h"},
        {"type": "thinking_delta", "thinking": "m"},
        {"type": "signature_delta", "signature": "S"},
    ),
    *block(1, {"type": "redacted_thinking", "data": "D"}),
    *block(2, {"type": "text", "text": ""}, {"type": "text_delta", "text": "你好🙂"}),
    *block(
        3,
        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        {"type": "input_json_delta", "partial_json": ""},
        {"type": "input_json_delta", "partial_json": '{"x"'},
        {"type": "input_json_delta", "partial_json": ":1}"},
    ),
    *block(4, {"type": "tool_use", "id": "b", "name": "g", "input": {}}),
    *end("tool_use"),
]
DETAILS = [
    {"type": "reasoning.text", "text": "hm", "signature": "S", "format": "anthropic-claude-v1", "index": 0},
    {"type": "reasoning.encrypted", "data": "D", "format": "anthropic-claude-v1", "index": 1},
]


def frames(events: list[dict[str, Any]], *, native: bool = False) -> list[Frame]:
    decoder = AnthropicDecoder(native)
    found = [frame for event in events for frame in decoder.event(None, json.dumps(event).encode())]
    assert decoder.ended
    return found


def test_a_stream_in_openai_s_chunks() -> None:
    found = frames(EVENTS)
    chunks = [ChatCompletionChunk.model_validate_json(frame.raw) for frame in found]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert {(chunk.id, chunk.model) for chunk in chunks} == {("msg_1", "claude")}
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "你好🙂"
    extra = [delta.to_dict() for delta in deltas]
    assert "".join(delta.get("reasoning_content", "") for delta in extra) == "hm"
    assert [detail for delta in extra for detail in delta.get("reasoning_details", [])] == DETAILS
    calls: dict[int, list[Any]] = {}
    for delta in deltas:
        for call in delta.tool_calls or []:
            assert call.function is not None
            id, name, arguments = calls.get(call.index, [call.id, call.function.name, ""])
            calls[call.index] = [id, name, arguments + (call.function.arguments or "")]
    assert calls == {0: ["a", "f", '{"x":1}'], 1: ["b", "g", "{}"]}
    assert [frame.finish_reason for frame in found] == [None] * (len(found) - 1) + ["tool_calls"]
    lengths = [frame.characters for frame in found if frame.characters]
    assert sum(lengths) == 36 and min(lengths) == CHARACTERS_PER_TOKEN, "a token a piece, two where it says 你好🙂"
    assert found[0].usage is not None and found[0].usage.prompt_tokens == 12
    last = found[-1].usage
    assert last is not None and chunks[-1].usage is not None
    assert (last.prompt_tokens, last.cached_tokens, last.cache_write_tokens, last.completion_tokens) == (12, 4, 5, 9)
    assert chunks[-1].usage.prompt_tokens == 12 and chunks[-1].usage.total_tokens == 21


@pytest.mark.parametrize("asked", [True, False])
def test_usage_is_shown_to_who_asks(asked: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if asked else {}
    upstream = anthropic_stream(*EVENTS)
    call = decoded(ChatSurface(), BODY | {"stream": True, **options})
    out = streamed(ChatSurface(), call, [upstream], decoder=AnthropicDecoder(native=False))
    assert out.endswith(b"data: [DONE]\n\n")
    payloads = [json.loads(line[6:]) for line in out.splitlines() if line.startswith(b"data: {")]
    assert [payload["usage"]["completion_tokens"] for payload in payloads if payload.get("usage")] == [9] * asked
    assert all((not payload["choices"]) == bool(payload.get("usage")) for payload in payloads)


def test_native_frames_keep_the_events() -> None:
    found = frames(EVENTS, native=True)
    sent = [event for event in EVENTS if event["type"] not in ("ping", "message_stop")]
    assert len(found) == len(sent)
    for frame, event in zip(found, sent, strict=True):
        assert frame.native is not None
        name, data = frame.native.decode().removesuffix("\n\n").split("\n")
        assert (name, json.loads(data.removeprefix("data: "))) == (f"event: {event['type']}", event)
    assert found[-1].finish_reason == "tool_calls" and found[-1].usage is not None
    held = [frame for frame in found[:-1] if frame.usage is not None and not frame.has_choices]
    assert held == [], "nothing but the end waits for the row"


def test_a_native_event_of_many_lines_stays_one() -> None:
    (frame,) = AnthropicDecoder(native=True).event(b"message_start", json.dumps(START, indent=1).encode())
    assert frame.native is not None and frame.native.count(b"\n") == 3


@pytest.mark.parametrize(
    ("reason", "sequence", "finish"),
    [
        ("end_turn", None, "stop"),
        ("stop_sequence", "END", "stop"),
        ("max_tokens", None, "length"),
        ("model_context_window_exceeded", None, "length"),
        ("tool_use", None, "tool_calls"),
        ("refusal", None, "content_filter"),
        ("pause_turn", None, "stop"),
    ],
)
def test_stop_reasons(reason: str, sequence: str | None, finish: str) -> None:
    *_, last = frames([START, *end(reason, sequence)])
    assert last.finish_reason == finish
    (choice,) = json.loads(last.raw)["choices"]
    assert choice.get("stop_reason") == sequence


def test_a_whole_answer() -> None:
    message = START["message"] | {
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "S"},
            {"type": "redacted_thinking", "data": "D"},
            {"type": "text", "text": "a"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "text", "text": "b"},
            {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "b", "name": "g", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
    }
    frame = AnthropicDecoder(native=False).whole(json.dumps(message).encode())
    answer = ChatCompletion.model_validate_json(frame.raw)
    said = answer.choices[0].message
    assert said.content == "ab" and said.tool_calls is not None
    assert [(c.id, c.function.name, c.function.arguments) for c in said.tool_calls if c.type == "function"] == [
        ("a", "f", '{"x":1}'),
        ("b", "g", "{}"),
    ]
    assert said.to_dict()["reasoning_content"] == "hm"
    assert said.to_dict()["reasoning_details"] == DETAILS
    assert (answer.choices[0].finish_reason, answer.id, answer.model) == ("tool_calls", "msg_1", "claude")
    assert answer.usage is not None and answer.usage.prompt_tokens == 12
    assert frame.native is None and frame.usage is not None
    native = AnthropicDecoder(native=True).whole(json.dumps(message).encode())
    assert native.native == json.dumps(message).encode()


def test_an_error_in_mid_stream() -> None:
    event = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    (frame,) = AnthropicDecoder(native=True).event(b"error", json.dumps(event).encode())
    assert frame.error == "Overloaded"


@pytest.mark.parametrize("data", [b"", b"[]", b'{"type":1}', b'{"no":"type"}', b'{"type":"message_start","message":3}'])
def test_what_is_no_event(data: bytes) -> None:
    with pytest.raises(MalformedError):
        AnthropicDecoder(native=False).event(None, data)
    with pytest.raises(MalformedError):
        AnthropicDecoder(native=False).whole(data)


def test_events_that_nobody_knows_yet_pass_by() -> None:
    events = [
        START,
        {"type": "brand_new"},
        *block(0, {"type": "brand_new"}, {"type": "brand_new_delta"}),
        *end("end_turn"),
    ]
    assert len(frames(events)) == 2
    assert len(frames(events, native=True)) == len(events) - 1


def test_odd_counts_do_not_lose_an_answer() -> None:
    delta = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": "many"}}
    *_, last = frames([START, delta, {"type": "message_stop"}])
    assert last.odd is not None and last.usage is not None and last.usage.prompt_tokens == 12


def test_an_openai_upstream_speaks_the_same() -> None:
    """The chunks made of Anthropic's events, sent as an OpenAI upstream would, give the same message again."""
    upstream = chat_stream(*(json.loads(frame.raw) for frame in frames(EVENTS)))
    call = decoded(MessagesSurface(), BODY | {"max_tokens": 5, "stream": True})
    out = streamed(MessagesSurface(), call, [upstream])
    data = [json.loads(line[6:]) for line in out.splitlines() if line.startswith(b"data: ")]
    starts = [event["content_block"] for event in data if event["type"] == "content_block_start"]
    assert [(start["type"], start.get("data"), start.get("name")) for start in starts] == [
        ("thinking", None, None),
        ("redacted_thinking", "D", None),
        ("text", None, None),
        ("tool_use", None, "f"),
        ("tool_use", None, "g"),
    ]
    assert {"type": "signature_delta", "signature": "S"} in [event.get("delta") for event in data]
