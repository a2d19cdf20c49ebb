"""Anthropic's Messages: its bodies in OpenAI's words."""

import json
from typing import Any

import pytest
from anthropic.types.shared import ErrorResponse

from gateway.api.messages import MessagesSurface
from gateway.call import Unsaid
from gateway.errors import ApiError
from tests.gateway.surfaces import decoded, fields_of

SURFACE = MessagesSurface()
BODY: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


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
