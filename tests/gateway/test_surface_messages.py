"""Anthropic's Messages: bodies to OpenAI chat, chat answers back, read by Anthropic's own types."""

import json
from typing import Any

import pytest
from anthropic.types import Message
from anthropic.types.shared import ErrorResponse

from gateway.api.messages import MessagesSurface
from gateway.call import Unsaid
from gateway.errors import ApiError, UpstreamReplyError
from gateway.upstreams.anthropic_decoder import AnthropicDecoder
from tests.gateway.surfaces import (
    CALLS,
    INTERLEAVED,
    USAGE,
    anthropic_stream,
    chat_stream,
    chunk,
    decoded,
    events,
    fields_of,
    message_of,
    streamed,
    usage_fields,
    whole,
)

SURFACE = MessagesSurface()
BODY: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
HELLO = [chunk({"role": "assistant", "content": ""}), chunk({"content": "Hello"}), chunk({}, "stop")]


def fields(**changes: Any) -> dict[str, Any]:
    return fields_of(decoded(SURFACE, BODY | changes))


def unsaid(**changes: Any) -> list[Unsaid]:
    return list(decoded(SURFACE, BODY | changes).unsaid)


def refusal(**changes: Any) -> ApiError:
    body = {name: value for name, value in (BODY | changes).items() if value is not ...}
    with pytest.raises(ApiError) as caught:
        decoded(SURFACE, body)
    assert caught.value.status == 400
    return caught.value


def test_a_body_in_openai_s_words() -> None:
    said = fields(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        metadata={"user_id": "ada"},
        service_tier="standard_only",
        stream=True,
        brand_new=[1],
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert said.pop("messages") == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    form = {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True}}
    assert said == {
        "model": "m",
        "max_tokens": 50,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "user": "ada",
        "service_tier": "default",
        "stream": True,
        "brand_new": [1],
        "response_format": form,
    }


def test_what_the_gateway_knows_of_a_call() -> None:
    call = decoded(SURFACE, BODY | {"metadata": {"user_id": "ada"}, "tools": [{"name": "f", "input_schema": {}}]})
    assert (call.api, call.kind, call.requested_model, call.max_output, call.choices) == (
        "messages",
        "chat",
        "m",
        50,
        1,
    )
    assert (call.tags, call.has_tools, call.stream) == ({"user": "ada"}, True, False)
    assert call.original is not None and json.loads(bytes(call.original["metadata"])) == {"user_id": "ada"}


def test_a_round_of_tools() -> None:
    picture = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "source": picture}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "two tools", "signature": "S"},
                {"type": "redacted_thinking", "data": "X"},
                {"type": "text", "text": "On it."},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"x": "é"}},
                {"type": "tool_use", "id": "b", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "1"},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "is_error": True,
                    "content": [
                        {"type": "text", "text": "no"},
                        {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
                    ],
                },
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    function = {"type": "function", "function": {"name": "f", "arguments": '{"x":"é"}'}}
    assert fields(messages=turns)["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            ],
        },
        {
            "role": "assistant",
            "content": "On it.",
            "reasoning_content": "two tools",
            "tool_calls": [
                {"id": "a", **function},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
                {"type": "text", "text": "go on"},
            ],
        },
    ]


def test_what_was_thought_before_the_last_question_is_left_out() -> None:
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]}
    said = fields(messages=[*BODY["messages"], thought, {"role": "user", "content": "and?"}])["messages"]
    assert said[1] == {"role": "assistant", "content": ""}


def test_documents() -> None:
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
    text = {"type": "text", "media_type": "text/plain", "data": "plain"}
    blocks = [{"type": "document", "source": pdf, "title": "a.pdf"}, {"type": "document", "source": text}]
    (message,) = fields(messages=[{"role": "user", "content": blocks}])["messages"]
    file = {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}
    assert message["content"] == [{"type": "file", "file": file}, {"type": "text", "text": "plain"}]


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "f"},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
    ],
)
def test_tools_and_their_choice(choice: dict[str, Any], said: dict[str, Any]) -> None:
    tool = {"name": "f", "description": "does f", "input_schema": {"type": "object"}, "strict": True}
    got = fields(tools=[tool | {"cache_control": {"type": "ephemeral"}}], tool_choice=choice)
    function = {"name": "f", "description": "does f", "parameters": {"type": "object"}, "strict": True}
    assert got["tools"] == [{"type": "function", "function": function}]
    assert {name: got[name] for name in got if name in ("tool_choice", "parallel_tool_calls")} == said


@pytest.mark.parametrize(
    ("thinking", "output", "effort"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {}, "low"),
        ({"type": "enabled", "budget_tokens": 10_000}, {}, "medium"),
        ({"type": "enabled", "budget_tokens": 30_000}, {}, "high"),
        ({"type": "adaptive"}, {"effort": "xhigh"}, "xhigh"),
        ({"type": "adaptive"}, {}, None),
        ({"type": "disabled"}, {}, None),
    ],
)
def test_how_hard_to_think(thinking: dict[str, Any], output: dict[str, Any], effort: str | None) -> None:
    assert fields(thinking=thinking, output_config=output).get("reasoning_effort") == effort


def test_what_only_anthropic_has() -> None:
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    file = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    found = unsaid(
        container="c",
        mcp_servers=None,
        tools=[server_tool, {"name": "f", "input_schema": {}, "defer_loading": True}],
        messages=[{"role": "user", "content": [file]}],
        thinking={"type": "between_tools"},
    )
    assert found == [
        Unsaid("messages[0].content[0] (image)", False),
        Unsaid("container", True),
        Unsaid("tools[0] (web_search_20250305)", True),
        Unsaid("tools[1].defer_loading", True),
        Unsaid("thinking (between_tools)", True),
    ]
    start = [*BODY["messages"], {"role": "assistant", "content": "The answer is"}]
    assert unsaid(messages=start) == [Unsaid("messages[1] (the start of the answer)", False)]


def test_leaving_out_what_cannot_be_said() -> None:
    call = decoded(SURFACE, BODY | {"container": "c"})
    assert call.leave_unsaid(drop=True) == ("container",)
    with pytest.raises(ApiError, match="container") as caught:
        call.leave_unsaid(drop=False)
    assert (caught.value.status, caught.value.param) == (400, "container")
    start = [*BODY["messages"], {"role": "assistant", "content": "The answer is"}]
    with pytest.raises(ApiError, match="the start of the answer"):  # no parameter: it is never dropped
        decoded(SURFACE, BODY | {"messages": start}).leave_unsaid(drop=True)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, None),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"system": 3}, "system"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], param: str | None) -> None:
    error = refusal(**changes)
    assert param is None or error.param == param
    ErrorResponse.model_validate_json(SURFACE.error(error))


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
    {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "claude",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 3, "output_tokens": 1, "cache_read_input_tokens": 4},
        },
    },
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
