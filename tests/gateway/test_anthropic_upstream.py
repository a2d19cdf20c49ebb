"""Anthropic as an upstream: chat bodies in its words, its answers in OpenAI's, read by OpenAI's own types."""

import dataclasses
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.api.chat import ChatSurface
from gateway.api.completions import CompletionsSurface
from gateway.api.count_tokens import CountTokensSurface, uncountable
from gateway.api.messages import MessagesSurface
from gateway.api.responses import ResponsesSurface
from gateway.call import Call
from gateway.errors import ApiError
from gateway.upstreams.anthropic import AnthropicDialect, counted
from gateway.upstreams.anthropic_decoder import AnthropicDecoder
from gateway.upstreams.frames import Frame, MalformedError
from tests.gateway.surfaces import anthropic_stream, chat_stream, decoded, streamed

DIALECT = AnthropicDialect()
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**changes: Any) -> Call:
    return decoded(ChatSurface(), BODY | changes)


def request(call: Call, *, cap: int | None = None, drop: bool = False) -> dict[str, Any]:
    sent = DIALECT.request(call, "claude", cap, drop)
    assert sent.path == "/messages"
    body: dict[str, Any] = json.loads(sent.body)
    return body


def refusal(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        request(chat(**changes))
    assert caught.value.status == 400
    return caught.value


def test_headers() -> None:
    assert DIALECT.headers("k") == {"anthropic-version": "2023-06-01", "x-api-key": "k"}
    assert DIALECT.headers(None) == {"anthropic-version": "2023-06-01"}


def test_the_least_that_is_sent() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert request(chat()) == {"model": "claude", "messages": [message], "max_tokens": 4096}


@pytest.mark.parametrize(
    ("fields", "cap", "limit"),
    [
        ({"max_tokens": 5}, None, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, None, 6),
        ({}, 7, 7),
        ({"max_tokens": 0}, None, 0),
    ],
)
def test_the_limit_of_an_answer(fields: dict[str, Any], cap: int | None, limit: int) -> None:
    assert request(chat(**fields), cap=cap)["max_tokens"] == limit


def test_neutral_values_ask_for_nothing() -> None:
    neutral = {"n": 1, "logprobs": False, "logit_bias": {}, "presence_penalty": 0, "seed": None, "store": False}
    neutral |= {"response_format": {"type": "text"}, "stream_options": {"include_usage": True}, "prompt_cache_key": "k"}
    assert request(chat(**neutral)).keys() == {"model", "messages", "max_tokens"}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"n": 2}, "n"),
        ({"seed": 1}, "seed"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"temperature": 1.5}, "temperature"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "hi", "name": "ada"}]}, "messages[0].name"),
    ],
)
def test_what_anthropic_cannot_do_is_refused_or_dropped_by_name(changes: dict[str, Any], name: str) -> None:
    error = refusal(**changes)
    assert error.param == name and error.code == "unsupported_parameter"
    sent = DIALECT.request(chat(**changes), "claude", None, True)
    assert [dropped.partition(" ")[0] for dropped in sent.dropped] == [name]
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert json.loads(sent.body) == {"model": "claude", "messages": [message], "max_tokens": 4096}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[1]"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:a,b"}}]}, None),
    ],
)
def test_content_that_cannot_be_said_is_never_dropped(message: dict[str, Any], param: str | None) -> None:
    for drop in (False, True):
        with pytest.raises(ApiError) as caught:
            request(chat(messages=[message]), drop=drop)
        assert caught.value.status == 400 and (param is None or caught.value.param == param)


def test_system_messages_lead_or_stay_where_they_are() -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "q"},
        {"role": "system", "content": "c"},
    ]
    sent = request(chat(messages=messages))
    assert [block["text"] for block in sent["system"]] == ["a", "b"]
    assert sent["messages"][1] == {"role": "system", "content": [{"type": "text", "text": "c"}]}


def test_parts_of_content() -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "image_url", "image_url": {"url": "data:image/webp;base64,AAAA", "detail": "auto"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}},
    ]
    assert request(chat(messages=[{"role": "user", "content": parts}]))["messages"][0]["content"] == [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/webp", "data": "AAAA"}},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
            "title": "a.pdf",
        },
    ]


def test_reasoning_effort() -> None:
    sent = request(chat(reasoning_effort="minimal"))
    assert (sent["output_config"], sent["thinking"]) == ({"effort": "low"}, {"type": "adaptive"})
    sent = request(chat(reasoning_effort="none"))
    assert sent["thinking"] == {"type": "disabled"} and "output_config" not in sent
    own = {"type": "enabled", "budget_tokens": 2000}
    assert request(chat(reasoning_effort="high", thinking=own))["thinking"] == own


def test_thinking_is_not_asked_for_in_mid_round_without_the_thoughts_before() -> None:
    """Anthropic refuses to go on thinking about a call whose thoughts are gone."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [*BODY["messages"], answer, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    sent = request(chat(messages=messages, reasoning_effort="high"))
    assert "thinking" not in sent and sent["output_config"] == {"effort": "high"}


def test_an_own_caller_s_body_goes_on_as_it_came() -> None:
    body = {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "search_result", "title": "t"}]}],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "container": "c",
        "brand_new": {"a": [1]},
    }
    assert request(decoded(MessagesSurface(), body)) == body | {"model": "claude"}


def test_thoughts_of_other_models_are_left_out() -> None:
    signed = {"type": "thinking", "thinking": "mine", "signature": "S"}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "not mine", "signature": ""}]},
        {"role": "assistant", "content": [signed, {"type": "text", "text": "a"}]},
        {"role": "user", "content": "r"},
    ]
    sent = request(decoded(MessagesSurface(), {"model": "m", "max_tokens": 5, "messages": turns}))
    assert sent["messages"] == [turns[0], turns[2], turns[3]]


def test_what_a_response_cannot_say_in_chat_is_refused_here_too() -> None:
    call = decoded(ResponsesSurface(), {"model": "m", "input": "q", "tools": [{"type": "web_search"}]})
    with pytest.raises(ApiError, match="web_search"):
        request(call)
    assert DIALECT.request(call, "claude", None, True).dropped == ("tools[0] (web_search)",)


def test_only_conversations() -> None:
    with pytest.raises(ApiError, match="completions"):
        DIALECT.request(decoded(CompletionsSurface(), {"model": "m", "prompt": "a"}), "claude", None, True)


def test_counting_tokens() -> None:
    body = {"model": "m", "messages": BODY["messages"], "system": "s", "metadata": {"user_id": "u"}}
    sent = DIALECT.count_request(decoded(CountTokensSurface(), body), "claude")
    assert sent.path == "/messages/count_tokens"
    assert json.loads(sent.body) == {"model": "claude", "messages": BODY["messages"], "system": "s"}
    translated = json.loads(DIALECT.count_request(chat(seed=1), "claude").body)
    assert translated == {"model": "claude", "messages": request(chat())["messages"]}
    assert counted(b'{"input_tokens":12}') == 12
    with pytest.raises(MalformedError):
        counted(b'{"error":1}')
    assert json.loads(CountTokensSurface().answer(12)) == {"input_tokens": 12}
    error = uncountable("m")
    assert (error.status, error.headers) == (501, {"x-should-retry": "false"})


USAGE = {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 5, "output_tokens": 1}
START = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [],
        "usage": USAGE,
    },
}


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
    assert sum(frame.characters for frame in found) == len("hm你好🙂" + 'f{"x":1}' + "g{}")
    assert found[0].usage is not None and found[0].usage.prompt_tokens == 12
    last = found[-1].usage
    assert last is not None and chunks[-1].usage is not None
    assert (last.prompt_tokens, last.cached_tokens, last.cache_write_tokens, last.completion_tokens) == (12, 4, 5, 9)
    assert chunks[-1].usage.prompt_tokens == 12 and chunks[-1].usage.total_tokens == 21


@pytest.mark.parametrize("asked", [True, False])
def test_usage_is_shown_to_who_asks(asked: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if asked else {}
    upstream = anthropic_stream(*EVENTS)
    out = streamed(ChatSurface(), chat(stream=True, **options), [upstream], decoder=AnthropicDecoder(native=False))
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
    body = {"model": "m", "max_tokens": 5, "messages": BODY["messages"], "stream": True}
    call = decoded(MessagesSurface(), body)
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


def test_betas_of_its_own_callers() -> None:
    body = {"model": "m", "max_tokens": 5, "messages": BODY["messages"]}
    call = dataclasses.replace(decoded(MessagesSurface(), body), betas="context-1m-2025-08-07")
    assert DIALECT.request(call, "claude", None, False).headers == {"anthropic-beta": "context-1m-2025-08-07"}
    assert DIALECT.count_request(call, "claude").headers == {"anthropic-beta": "context-1m-2025-08-07"}
    assert DIALECT.request(chat(), "claude", None, False).headers == {}
