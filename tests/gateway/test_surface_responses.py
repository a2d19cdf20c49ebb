"""OpenAI's Responses without a memory: items to chat, chat answers to items and events, read by OpenAI's own types."""

import json
from typing import Any

import pytest
from openai.types.responses import Response

from gateway.api.responses import ResponsesSurface
from gateway.call import Unsaid
from gateway.errors import ApiError
from gateway.upstreams.frames import ChatDecoder
from tests.gateway.surfaces import (
    CALLS,
    INTERLEAVED,
    USAGE,
    chat_stream,
    chunk,
    decoded,
    fields_of,
    response_events,
    response_of,
    streamed,
    usage_fields,
    whole,
)

SURFACE = ResponsesSurface()
BODY: dict[str, Any] = {"model": "m", "input": "hi"}
HELLO = [chunk({"role": "assistant", "content": ""}), chunk({"content": "Hello"}), chunk({}, "stop")]
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def fields(**changes: Any) -> dict[str, Any]:
    return fields_of(decoded(SURFACE, BODY | changes))


def messages(*items: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = fields(input=list(items), **changes)["messages"]
    return found


def refusal(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decoded(SURFACE, BODY | changes)
    assert caught.value.status == 400
    return caught.value


def answer(changes: dict[str, Any], *chunks: dict[str, Any], **options: Any) -> Response:
    call = decoded(SURFACE, BODY | {"stream": True} | changes)
    return response_of(streamed(SURFACE, call, [chat_stream(*chunks)], **options))


def test_a_body_in_the_words_of_chat() -> None:
    said = fields(
        instructions="Be brief.",
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        tools=[FUNCTION | {"description": "does f"}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        metadata={"a": "b"},
        store=False,
        truncation="disabled",
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        top_logprobs=2,
        prompt_cache_key="k",
        user="ada",
        stream=True,
        stream_options={"include_obfuscation": False},
        brand_new=[1],
    )
    function = {"name": "f", "description": "does f", "parameters": {"type": "object"}, "strict": True}
    assert said == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}},
        "verbosity": "low",
        "reasoning_effort": "low",
        "logprobs": True,
        "top_logprobs": 2,
        "prompt_cache_key": "k",
        "user": "ada",
        "stream": True,
        "brand_new": [1],
    }


def test_what_the_gateway_knows_of_a_call() -> None:
    call = decoded(SURFACE, BODY | {"user": "ada", "max_output_tokens": 7, "tools": [FUNCTION]})
    assert (call.api, call.kind, call.max_output, call.choices) == ("responses", "chat", 7, 1)
    assert (call.tags, call.has_tools, call.unsaid) == ({"user": "ada"}, True, ())


def test_a_choice_among_no_tools_is_nothing_to_say() -> None:
    """Which chat completions refuse and Responses take."""
    assert fields(tool_choice="auto", parallel_tool_calls=True).keys() == {"model", "messages"}


def test_a_round_of_tools() -> None:
    found = messages(
        {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "two tools"}],
            "encrypted_content": "signed.S",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "On it."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x":1}', "id": "fc_1"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [
                {"type": "input_text", "text": "2"},
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"},
            ],
        },
    )
    assert found == [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": "On it.",
            "reasoning_content": "two tools",
            "reasoning_details": [{"type": "reasoning.text", "text": "two tools", "signature": "S"}],
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
            ],
        },
    ]


def test_items_of_every_role_and_kind_of_content() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"},
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
    ]
    found = messages(
        {"type": "message", "role": "developer", "content": "rules"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "again"},
    )
    assert found == [
        {"role": "developer", "content": "rules"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {
                    "type": "file",
                    "file": {"file_data": "data:application/pdf;base64,JVBE", "filename": "a.pdf"},
                },
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            ],
        },
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "again"},
    ]


def test_what_was_thought_before_the_last_question_is_left_out() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "a"}
    assert messages({"role": "user", "content": "q"}, thought, said, {"role": "user", "content": "r"})[1] == said
    kept = messages({"role": "user", "content": "q"}, thought, said)[1]
    assert kept == said | {"reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ],
)
def test_what_is_wrong_or_would_need_a_memory(changes: dict[str, Any], param: str) -> None:
    error = refusal(**changes)
    assert error.param == param
    assert json.loads(SURFACE.error(error))["error"]["message"] == error.message


def test_what_chat_has_no_words_for() -> None:
    call = decoded(
        SURFACE,
        BODY
        | {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "file_id": "f"}]},
                {"type": "computer_call_output"},
            ],
            "tools": [{"type": "web_search"}, FUNCTION | {"defer_loading": True, "async": False}],
            "tool_choice": {"type": "web_search"},
            "truncation": "auto",
            "reasoning": {"effort": "low", "summary": "concise"},
            "moderation": {"model": "x"},
            "stream_options": {"include_obfuscation": True},
        },
    )
    assert call.unsaid == (
        Unsaid("input[0].content[0] (input_image)", False),
        Unsaid("input[1] (computer_call_output)", False),
        Unsaid("moderation", True),
        Unsaid("tools[0] (web_search)", True),
        Unsaid("tools[1].defer_loading", True),
        Unsaid("tool_choice (web_search)", True),
        Unsaid("reasoning.summary", True),
        Unsaid("stream_options.include_obfuscation", True),
        Unsaid("truncation (auto)", True),
    )


def test_allowed_tools() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert fields(tools=[FUNCTION], tool_choice=choice)["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": allowed,
    }


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
    again = messages({"role": "user", "content": "q"}, *items)
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


def test_usage_from_a_frame_of_its_own() -> None:
    last = chunk({}) | {"choices": [], "usage": usage_fields(USAGE)}
    response = answer({}, *HELLO, last)
    assert response.usage is not None and response.usage.input_tokens == 20


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
