"""OpenAI's Responses without a memory: items in the words of chat."""

import json
from typing import Any

import pytest

from gateway.api.responses import ResponsesSurface
from gateway.call import Unsaid
from gateway.errors import ApiError
from tests.gateway.surfaces import decoded, fields_of

SURFACE = ResponsesSurface()
BODY: dict[str, Any] = {"model": "m", "input": "hi"}
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
