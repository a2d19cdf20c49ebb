"""Anthropic as an upstream: what it is asked, in its own words."""

import json
from typing import Any

import msgspec
import pytest

from gateway.api.chat import ChatSurface
from gateway.api.completions import CompletionsSurface
from gateway.api.count_tokens import CountTokensSurface, uncountable
from gateway.api.messages import MessagesSurface
from gateway.api.responses import ResponsesSurface
from gateway.call import Call
from gateway.errors import ApiError
from gateway.upstreams.anthropic import AnthropicDialect, counted
from gateway.upstreams.dialect import Limits
from gateway.upstreams.frames import MalformedError
from tests.gateway.surfaces import decoded

DIALECT = AnthropicDialect()
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**changes: Any) -> Call:
    return decoded(ChatSurface(), BODY | changes)


def request(call: Call, *, cap: int | None = None, usual: int | None = None, drop: bool = False) -> dict[str, Any]:
    sent = DIALECT.request(call, "claude", Limits(cap, usual), drop)
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
    ("fields", "cap", "usual", "limit"),
    [
        ({"max_tokens": 5}, None, 64_000, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, None, None, 6),
        ({}, 7, 64_000, 7),
        ({}, None, 64_000, 64_000),
        ({"max_tokens": 0}, None, 64_000, 0),
    ],
)
def test_the_limit_of_an_answer(fields: dict[str, Any], cap: int | None, usual: int | None, limit: int) -> None:
    assert request(chat(**fields), cap=cap, usual=usual)["max_tokens"] == limit


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
    sent = DIALECT.request(chat(**changes), "claude", Limits(), True)
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
    assert DIALECT.request(call, "claude", Limits(), True).dropped == ("tools[0] (web_search)",)


def test_only_conversations() -> None:
    with pytest.raises(ApiError, match="completions"):
        DIALECT.request(decoded(CompletionsSurface(), {"model": "m", "prompt": "a"}), "claude", Limits(), True)


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


def test_betas_of_its_own_callers() -> None:
    body = {"model": "m", "max_tokens": 5, "messages": BODY["messages"]}
    call = msgspec.structs.replace(decoded(MessagesSurface(), body), betas="context-1m-2025-08-07")
    assert DIALECT.request(call, "claude", Limits(), False).headers == {"anthropic-beta": "context-1m-2025-08-07"}
    assert DIALECT.count_request(call, "claude").headers == {"anthropic-beta": "context-1m-2025-08-07"}
    assert DIALECT.request(chat(), "claude", Limits(), False).headers == {}
