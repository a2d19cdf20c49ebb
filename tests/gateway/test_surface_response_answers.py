"""OpenAI's Responses without a memory: chat answers as items and events, read by OpenAI's own types."""

import json
from typing import Any

import pytest
from openai.types.responses import Response

from gateway.api.responses import ResponsesSurface
from gateway.errors import ApiError
from gateway.upstreams.frames import ChatDecoder
from tests.gateway.surfaces import (
    CALLS,
    HELLO,
    INTERLEAVED,
    USAGE,
    chat_stream,
    chunk,
    decoded,
    fields_of,
    response_events,
    response_of,
    streamed,
    whole,
)

SURFACE = ResponsesSurface()
BODY: dict[str, Any] = {"model": "m", "input": "hi"}
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def answer(changes: dict[str, Any], *chunks: dict[str, Any], **options: Any) -> Response:
    call = decoded(SURFACE, BODY | {"stream": True} | changes)
    return response_of(streamed(SURFACE, call, [chat_stream(*chunks)], **options))


def test_the_events_of_a_text_in_order() -> None:
    call = decoded(SURFACE, BODY | {"stream": True})
    found = response_events(streamed(SURFACE, call, [chat_stream(*HELLO)], usage=USAGE))
    assert [event.type for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert found[0].response.status == "in_progress" and found[0].response.output == []
    response = found[-1].response
    assert (response.status, response.output_text, response.model) == ("completed", "Hello", "m-1")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (20, 7, 27)
    details = response.usage.input_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == (8, 2)
    assert response.usage.output_tokens_details.reasoning_tokens == 3


def test_the_events_of_reasoning_and_parallel_calls() -> None:
    thinking = [chunk({"reasoning_content": "hm"}), chunk({"reasoning_content": "m"})]
    response = answer({"tools": [FUNCTION]}, *thinking, *INTERLEAVED)
    reasoning, text, *calls = response.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["hmm"] and reasoning.summary == []
    assert text.type == "message" and response.output_text == "Let me look."
    assert [(c.call_id, c.name, json.loads(c.arguments)) for c in calls if c.type == "function_call"] == CALLS
    assert {item.status for item in response.output if item.type != "message"} == {"completed"}


def test_a_summary_is_the_reasoning_itself() -> None:
    response = answer({"reasoning": {"summary": "auto"}}, chunk({"reasoning": "hm"}), *HELLO)
    reasoning = response.output[0]
    assert reasoning.type == "reasoning" and [part.text for part in reasoning.summary] == ["hm"]
    assert response.reasoning is not None and response.reasoning.summary == "auto"


def test_signed_reasoning_comes_back_when_it_is_sent_again() -> None:
    details = [{"type": "reasoning.text", "text": "hm", "signature": "S"}, {"type": "reasoning.encrypted", "data": "D"}]
    include = {"include": ["reasoning.encrypted_content"]}
    response = answer(include, chunk({"reasoning_content": "hm"}), chunk({"reasoning_details": details}), *HELLO)
    items = [item.to_dict() for item in response.output]
    body = BODY | {"input": [{"role": "user", "content": "q"}, *items]}
    again = fields_of(decoded(SURFACE, body))["messages"]
    assert again[1]["reasoning_details"] == details
    assert again[1]["content"] == "Hello"
    silent = answer({}, chunk({"reasoning_content": "hm"}), chunk({"reasoning_details": details}), *HELLO)
    assert all("encrypted_content" not in item.to_dict() for item in silent.output), "only where it is asked for"


def test_a_refusal() -> None:
    response = answer({}, chunk({"refusal": "I "}), chunk({"refusal": "won't."}), chunk({}, "stop"))
    (message,) = response.output
    assert message.type == "message"
    (content,) = message.content
    assert content.type == "refusal" and content.refusal == "I won't."


def test_log_probabilities() -> None:
    token = {"token": "Hello", "logprob": -0.5, "bytes": [72], "top_logprobs": []}
    chunks = [chunk({"content": "Hello"}, logprobs={"content": [token]}), chunk({}, "stop")]
    call = decoded(SURFACE, BODY | {"stream": True, "include": ["message.output_text.logprobs"]})
    found = response_events(streamed(SURFACE, call, [chat_stream(*chunks)]))
    delta = next(event for event in found if event.type == "response.output_text.delta")
    assert delta.logprobs[0].logprob == -0.5
    (message,) = found[-1].response.output
    assert message.content[0].logprobs[0].token == "Hello"
    reply = whole({"content": "Hello"}, "stop", logprobs={"content": [token]})
    (item,) = Response.model_validate_json(SURFACE.whole(call, reply)).output
    assert item.type == "message" and item.content[0].to_dict() == message.content[0].to_dict()


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter"), ("stop", None)]
)
def test_how_it_ended(finish: str, reason: str | None) -> None:
    response = answer({}, chunk({"content": "a"}), chunk({}, finish))
    assert response.status == ("completed" if reason is None else "incomplete")
    assert (response.incomplete_details and response.incomplete_details.reason) == reason
    (message,) = response.output
    assert message.type == "message" and message.status == response.status


def test_a_stream_that_the_gateway_cuts() -> None:
    call = decoded(SURFACE, BODY | {"stream": True})
    pieces = [chat_stream(*HELLO[:2])]
    assert response_of(streamed(SURFACE, call, pieces, usage=USAGE, cut=True)).status == "incomplete"


@pytest.mark.parametrize("place", range(1, 12))
def test_characters_cut_at_any_byte(place: int) -> None:
    text = "你好🙂"
    call = decoded(SURFACE, BODY | {"stream": True})
    upstream = chat_stream(chunk({"content": text}), chunk({}, "stop"))
    at = upstream.index(text.encode()) + place - 1
    assert response_of(streamed(SURFACE, call, [upstream[:at], upstream[at:]])).output_text == text


def test_a_whole_answer_repeats_its_settings() -> None:
    settings = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "tools": [FUNCTION],
        "temperature": 0.5,
        "text": {"format": {"type": "json_object"}},
        "top_p": None,
    }
    call = decoded(SURFACE, BODY | settings)
    reply = whole({"content": "{}", "reasoning_content": "hm"}, "stop")
    response = Response.model_validate_json(SURFACE.whole(call, reply))
    assert (response.object, response.status, response.output_text) == ("response", "completed", "{}")
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert response.tools[0].to_dict() == FUNCTION
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_object"
    assert (response.parallel_tool_calls, response.tool_choice, response.truncation) == (True, "auto", "disabled")
    assert response.usage is not None and response.usage.output_tokens == 7
    assert json.loads(SURFACE.whole(call, reply))["store"] is False


def test_settings_with_line_breaks_stay_on_one_line() -> None:
    body = b'{"model": "m", "input": "hi", "stream": true, "metadata": {\n  "a":\n "b\\n"\n}}'
    response = response_of(streamed(SURFACE, SURFACE.decode(body), [chat_stream(*HELLO)]))
    assert response.metadata == {"a": "b\n"}


def test_an_error_in_mid_stream() -> None:
    """OpenAI's clients raise at the event with an `error`; those that read events find the failed response first."""
    writer = SURFACE.writer(decoded(SURFACE, BODY | {"stream": True}))
    start = writer.write(ChatDecoder().whole(json.dumps(HELLO[1]).encode()))
    found = response_events(start + writer.fail(ApiError(502, "upstream_error", "It died.")))
    failed, error = found[-2:]
    assert (failed.type, failed.response.status, failed.response.error.code) == (
        "response.failed",
        "failed",
        "server_error",
    )
    assert failed.response.output_text == "Hello"
    assert (error.type, error.message, error.code) == ("error", "It died.", "upstream_error")
    assert error.to_dict()["error"]["message"] == "It died."


def test_an_error_before_anything_else() -> None:
    writer = SURFACE.writer(decoded(SURFACE, BODY | {"stream": True}))
    found = response_events(writer.fail(ApiError(502, "upstream_error", "It died.")))
    assert [event.type for event in found] == ["response.created", "response.in_progress", "response.failed", "error"]
