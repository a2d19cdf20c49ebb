"""Anthropic's Messages: chat answers in its words, read by its own types."""

from typing import Any

import pytest
from anthropic.types import Message
from anthropic.types.shared import ErrorResponse

from gateway.api.messages import MessagesSurface
from gateway.errors import ApiError, UpstreamReplyError
from gateway.upstreams.anthropic_decoder import AnthropicDecoder
from tests.gateway.surfaces import (
    CALLS,
    HELLO,
    INTERLEAVED,
    USAGE,
    anthropic_stream,
    chat_stream,
    chunk,
    decoded,
    events,
    message_of,
    message_start,
    streamed,
    usage_fields,
    whole,
)

SURFACE = MessagesSurface()
BODY: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


def test_a_stream_with_every_kind_of_block() -> None:
    call = decoded(SURFACE, BODY | {"stream": True})
    start = chunk({"role": "assistant", "content": ""}, usage=usage_fields(USAGE))
    thinking = chunk({"reasoning_content": "hm"})
    stream = streamed(SURFACE, call, [chat_stream(start, thinking, *INTERLEAVED)], usage=USAGE)
    message = message_of(stream)
    thought, text, *calls = message.content
    assert thought.type == "thinking" and thought.thinking == "hm"
    assert text.type == "text" and text.text == "Let me look."
    assert [(c.id, c.name, c.input) for c in calls if c.type == "tool_use"] == CALLS
    assert (message.stop_reason, message.stop_sequence, message.model) == ("tool_use", None, "m-1")
    first = events(stream)[0]["message"]["usage"]
    for usage in (first, message.usage.to_dict()):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (
            10,
            8,
            2,
        )
    assert message.usage.output_tokens == 7


def test_the_gateway_s_own_count_stands_in_until_the_upstream_reports() -> None:
    call = decoded(SURFACE, BODY | {"stream": True})
    stream = streamed(SURFACE, call, [chat_stream(*HELLO)], usage=USAGE)
    assert events(stream)[0]["message"]["usage"]["input_tokens"] == 5
    assert message_of(stream).usage.input_tokens == 10


@pytest.mark.parametrize("place", range(1, 12))
def test_characters_cut_at_any_byte(place: int) -> None:
    text = "你好🙂"
    assert len(text.encode()) == 10
    call = decoded(SURFACE, BODY | {"stream": True})
    upstream = chat_stream(chunk({"content": text}), chunk({}, "stop"))
    at = upstream.index(text.encode()) + place - 1
    (block,) = message_of(streamed(SURFACE, call, [upstream[:at], upstream[at:]])).content
    assert block.type == "text" and block.text == text


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (chunk({}, "stop"), "end_turn", None),
        (chunk({}, "length"), "max_tokens", None),
        (chunk({}, "content_filter"), "refusal", None),
        (chunk({"refusal": "No."}, "stop"), "refusal", None),
        (chunk({}, "stop", stop_reason="END"), "stop_sequence", "END"),
        (chunk({}, "stop", matched_stop="END"), "stop_sequence", "END"),
        (chunk({}, "stop", stop_reason=151645), "end_turn", None),
        (chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f"}}]}, "stop"), "tool_use", None),
    ],
)
def test_stop_reasons(end: dict[str, Any], reason: str, sequence: str | None) -> None:
    call = decoded(SURFACE, BODY | {"stream": True, "stop_sequences": ["END"]})
    message = message_of(streamed(SURFACE, call, [chat_stream(chunk({"content": "a"}), end)]))
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_a_whole_answer() -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    reply = whole({"content": "hi", "reasoning_content": "hm", "tool_calls": calls}, "tool_calls")
    message = Message.model_validate_json(SURFACE.whole(decoded(SURFACE, BODY), reply))
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    last = message.content[2]
    assert last.type == "tool_use" and last.input == {"x": 1}
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (10, 8, 2)
    assert usage.output_tokens_details is not None and usage.output_tokens_details.thinking_tokens == 3
    assert (message.stop_reason, message.role, message.type) == ("tool_use", "assistant", "message")


def test_arguments_that_were_cut_are_not_lost() -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}]
    message = Message.model_validate_json(SURFACE.whole(decoded(SURFACE, BODY), whole({"tool_calls": calls}, "length")))
    (block,) = message.content
    assert block.type == "tool_use" and block.input == {"INVALID_JSON": '{"x": '}
    assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_thinking_that_nobody_wants_to_see(thinking: dict[str, Any]) -> None:
    call = decoded(SURFACE, BODY | {"thinking": thinking})
    message = Message.model_validate_json(SURFACE.whole(call, whole({"content": "a", "reasoning": "hm"}, "stop")))
    assert [block.type for block in message.content] == ["text"]


def test_an_error_in_mid_stream() -> None:
    writer = SURFACE.writer(decoded(SURFACE, BODY | {"stream": True}))
    (event,) = events(writer.fail(ApiError(502, "upstream_error", "It died.")))
    error = ErrorResponse.model_validate(event).error
    assert (error.type, error.message) == ("api_error", "It died.")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (402, "billing_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_error_bodies(status: int, kind: str) -> None:
    error = ErrorResponse.model_validate_json(SURFACE.error(ApiError(status, "code", "Words."))).error
    assert (error.type, error.message) == (kind, "Words.")


def test_an_upstream_s_refusal_in_either_shape() -> None:
    theirs = b'{"error":{"message":"Too long.","type":"invalid_request_error","param":null,"code":null}}'
    error = ErrorResponse.model_validate_json(SURFACE.error(UpstreamReplyError(400, theirs, "Too long.", {}))).error
    assert (error.type, error.message) == ("invalid_request_error", "Too long.")
    native = b'{"type":"error","error":{"type":"rate_limit_error","message":"Slow."},"request_id":"req_1"}'
    assert SURFACE.error(UpstreamReplyError(429, native, "Slow.", {})) == native


NATIVE = (
    message_start({"input_tokens": 3, "output_tokens": 1, "cache_read_input_tokens": 4}),
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "你好🙂"}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None, "brand_new": 1},
        "usage": {"output_tokens": 9},
    },
    {"type": "message_stop"},
)


def test_an_upstream_s_own_events_go_through_as_they_came() -> None:
    call = decoded(SURFACE, BODY | {"stream": True})
    upstream = anthropic_stream(*NATIVE)
    for cut in range(1, len(upstream)):
        got = streamed(SURFACE, call, [upstream[:cut], upstream[cut:]], decoder=AnthropicDecoder(native=True))
        assert events(got) == list(NATIVE)


def test_an_answer_of_an_upstream_s_own_that_is_cut() -> None:
    """The gateway ends it: the open block is closed, and the stop reason is its own."""
    call = decoded(SURFACE, BODY | {"stream": True})
    upstream = anthropic_stream(*NATIVE[:3])
    got = streamed(SURFACE, call, [upstream], decoder=AnthropicDecoder(native=True), usage=USAGE, cut=True)
    message = message_of(got)
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 7
    assert [event["type"] for event in events(got)[3:]] == ["content_block_stop", "message_delta", "message_stop"]
