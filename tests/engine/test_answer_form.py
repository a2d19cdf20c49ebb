"""Forms of answers over HTTP with OpenAI's SDK: JSON, patterns, tool calls, thinking; streamed and not, and refused."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from parrot import TEMPLATE, parrot
from serving import serving
from test_tools import DECLARED, WEATHER, named

THINKING = "{# <think></think> #}" + TEMPLATE
OPENED = THINKING + "<think>{{ '\n' }}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "é🎉", "days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    plain = "{% for m in messages %}<text>{{ m.content }}{% endfor %}<say>"
    models = (
        parrot(added=["<tool_call>", "</tool_call>"]),
        parrot("thinker", THINKING, added=["<think>", "</think>"]),
        parrot("opened", OPENED, lead=2, added=["<think>", "</think>"]),
        parrot("closed", THINKING + "<think></think>", lead=2, added=["<think>", "</think>"]),
        parrot("control", THINKING, control=["<tool_call>", "</tool_call>"]),
        parrot("plain", plain),
        parrot("odd", plain + "{{ tools }}"),
    )
    with serving(*models) as url:
        yield url


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, says: str, model: str = "parrot", **options: Any) -> tuple[Any, Any]:
    """The same answer, whole and streamed: a message, its finish reason and its usage; checks that they agree."""
    options = {"temperature": 0, "max_tokens": 600, **options}
    messages = [{"role": "user", "content": says}]
    whole = client.chat.completions.create(model=model, messages=messages, **options)
    message = whole.choices[0].message
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish": None}
    stream = client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **options
    )
    for chunk in stream:
        if not chunk.choices:
            assert chunk.usage.completion_tokens == whole.usage.completion_tokens
            assert chunk.usage.completion_tokens_details == whole.usage.completion_tokens_details
            continue
        delta = chunk.choices[0].delta
        found["content"] += delta.content or ""
        found["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(found["calls"]) and call.type == "function"
                found["calls"].append([call.function.name, ""])
            assert call.index == len(found["calls"]) - 1
            found["calls"][call.index][1] += call.function.arguments
        found["finish"] = chunk.choices[0].finish_reason or found["finish"]
    assert found["content"] == (message.content or "")
    assert found["reasoning_content"] == (getattr(message, "reasoning_content", None) or "")
    assert found["calls"] == [[c.function.name, c.function.arguments] for c in message.tool_calls or []]
    assert found["finish"] == whole.choices[0].finish_reason
    return whole.choices[0], whole.usage


@pytest.mark.parametrize(
    ("model", "choice"),
    [("parrot", "auto"), ("parrot", "required"), ("parrot", named("weather")), ("control", "auto")],
)
def test_a_call_comes_out_as_one(client: openai.OpenAI, model: str, choice: Any) -> None:
    answer, usage = ask(client, CALL, model, tools=DECLARED, tool_choice=choice)
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "é🎉", "days": 3})
    assert usage.completion_tokens_details.reasoning_tokens == 0


def test_several_calls_and_text_before_them(client: openai.OpenAI) -> None:
    answer, _ = ask(client, f"I'll look. 你好\n{CALL}\n{CALL}", tools=DECLARED)
    assert answer.message.content == "I'll look. 你好" and len(answer.message.tool_calls) == 2
    answer, _ = ask(client, f"{CALL}\n{CALL}", tools=DECLARED, parallel_tool_calls=False)
    assert len(answer.message.tool_calls) == 1


def test_a_model_that_would_rather_talk_must_call(client: openai.OpenAI) -> None:
    answer, _ = ask(client, "No.", tools=DECLARED[:1], tool_choice="required")
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and set(arguments) <= set(WEATHER["properties"])
    answer, _ = ask(client, "No.", tools=DECLARED)
    assert answer.message.content == "No." and answer.finish_reason == "stop"


def test_without_tools_marks_are_text(client: openai.OpenAI) -> None:
    for options in ({}, {"tools": DECLARED, "tool_choice": "none"}):
        answer, _ = ask(client, CALL, **options)
        assert answer.message.content == CALL and not answer.message.tool_calls


def test_a_call_cut_by_max_tokens_ends_with_length(client: openai.OpenAI) -> None:
    answer, usage = ask(client, CALL, tools=DECLARED, max_tokens=50)
    assert answer.finish_reason == "length" and usage.completion_tokens == 50
    assert answer.message.tool_calls[0].function.arguments.startswith('{"city"')


def test_a_call_cut_by_a_stop_string_is_not_to_be_made(client: openai.OpenAI) -> None:
    answer, _ = ask(client, CALL, tools=DECLARED, stop="days")
    assert answer.finish_reason == "stop" and answer.message.tool_calls[0].function.arguments.startswith('{"city"')
    answer, _ = ask(client, CALL, tools=DECLARED, stop="</tool_call>")
    assert answer.finish_reason == "tool_calls"


def test_calls_and_results_of_earlier_turns_reach_the_template(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Noon."},
    ]
    reply = client.chat.completions.create(model="parrot", messages=messages, tools=DECLARED, temperature=0)
    assert reply.choices[0].message.content == "Noon." and reply.choices[0].finish_reason == "stop"


SAYS = "<think>\nHm, <b>?\n</think>\n\nFour."


def test_thinking_is_split_off_and_counted(client: openai.OpenAI) -> None:
    answer, usage = ask(client, SAYS, "thinker")
    assert answer.message.content == "Four." and answer.message.reasoning_content == "Hm, <b>?"
    thought = len("\nHm, <b>?\n") + 2
    assert usage.completion_tokens_details.reasoning_tokens == thought
    assert usage.completion_tokens == thought + len("\n\nFour.")
    answer, usage = ask(client, "Four.", "thinker")
    assert answer.message.content == "Four." and usage.completion_tokens_details.reasoning_tokens == 0
    answer, usage = ask(client, SAYS, "thinker", max_tokens=5)
    assert answer.message.reasoning_content == "Hm," and answer.finish_reason == "length"
    assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens == 5


def test_thinking_that_the_prompt_opens_is_split_off_too(client: openai.OpenAI) -> None:
    answer, usage = ask(client, "Hm.\n</think>\n\nFour.", "opened")
    assert answer.message.content == "Four." and answer.message.reasoning_content == "Hm."
    assert usage.completion_tokens_details.reasoning_tokens == len("Hm.\n") + 1
    answer, _ = ask(client, 'Hm.</think>{"x": 4}', "opened", response_format={"type": "json_object"})
    assert answer.message.content == '{"x": 4}' and answer.message.reasoning_content == "Hm."


def test_a_prompt_that_closes_the_thinking_leaves_the_answer(client: openai.OpenAI) -> None:
    answer, usage = ask(client, "<think>", "closed")
    assert answer.message.content == "<think>" and usage.completion_tokens_details.reasoning_tokens == 0
    answer, _ = ask(client, "<think>no</think>yes", "closed", extra_body={"guided_choice": ["<thin>"]})
    assert answer.message.content == "<thin>"


def test_the_account_tells_thinking_from_text(base: str) -> None:
    body = {"model": "thinker", "messages": [{"role": "user", "content": SAYS}], "temperature": 0}
    reply = httpx.post(f"{base}/v1/chat/completions", json=body).json()
    account, usage = reply["farthing"], reply["usage"]
    assert account["output_reasoning"] == usage["completion_tokens_details"]["reasoning_tokens"] == 12
    assert account["output_text"] + account["output_reasoning"] == usage["completion_tokens"]


def test_a_form_is_for_the_answer_and_not_for_the_thinking(client: openai.OpenAI) -> None:
    says = SAYS.replace("\n\nFour.", '{"x": 4}')
    answer, _ = ask(client, says, "thinker", response_format={"type": "json_object"})
    assert answer.message.content == '{"x": 4}' and answer.message.reasoning_content == "Hm, <b>?"


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("options", "says", "content"),
    [
        ({"response_format": {"type": "text"}}, "any", "any"),
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', '{"a": [1]}'),
        ({"response_format": schema_format(POINT, strict=True, description="d")}, '{"x": 12}', '{"x": 12}'),
        ({"response_format": schema_format(POINT)}, '{"x": 12}', '{"x": 12}'),
        ({"extra_body": {"guided_json": POINT}}, '{"x": -1}', '{"x": -1}'),
        ({"extra_body": {"guided_json": json.dumps(POINT)}}, '{"x": -1}', '{"x": -1}'),
        ({"extra_body": {"guided_regex": r"\d{2}é"}}, "42é", "42é"),
        ({"extra_body": {"guided_choice": ["yes", "no"]}}, "no, never", "no"),
        ({"extra_body": {"guided_grammar": 'start: "a"+ "!"'}}, "aaa!", "aaa!"),
    ],
)
def test_answers_have_the_form_that_was_asked_for(client: openai.OpenAI, options: Any, says: str, content: str) -> None:
    answer, _ = ask(client, says, **options)
    assert answer.message.content == content and answer.finish_reason == "stop"


def test_text_completions_take_forms_too(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="plain", prompt="<text>no<say>", temperature=0, extra_body={"guided_choice": ["yes", "nope"]}
    )
    assert reply.choices[0].text == "nope" and reply.choices[0].finish_reason == "stop"


def test_a_form_beside_tools_is_for_answers_that_call_none(client: openai.OpenAI) -> None:
    wanted = {"tools": DECLARED, "response_format": schema_format(POINT)}
    assert ask(client, '{"x": 1}', **wanted)[0].message.content == '{"x": 1}'
    assert len(ask(client, CALL, **wanted)[0].message.tool_calls) == 1


def test_each_choice_has_its_own_place_in_the_grammar(client: openai.OpenAI) -> None:
    options = {"n": 4, "seed": 1, "temperature": 1.5, "extra_body": {"guided_regex": "[a-z]{3}[0-9]{3}"}}
    messages = [{"role": "user", "content": ""}]
    reply = client.chat.completions.create(model="parrot", messages=messages, **options)
    texts = {choice.message.content for choice in reply.choices}
    assert len(texts) > 1 and all(len(text) == 6 and text[:3].isalpha() and text[3:].isdigit() for text in texts)


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"model": "plain", "tools": DECLARED}, "tools", "no place for tools"),
        ({"model": "odd", "tools": DECLARED}, "tools", "not supported"),
        ({"tools": [{"type": "x"}]}, "tools[0]", "must look like"),
        ({"tool_choice": "required"}, "tool_choice", "declare the functions"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking", "it has enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "not an option"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "not an option"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object or json_schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "Unknown parameter"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must look like"),
        (
            {"response_format": schema_format(POINT, strict="yes")},
            "response_format.json_schema.strict",
            "true or false",
        ),
        ({"response_format": schema_format(POINT, size=1)}, "response_format.json_schema.size", "Unknown parameter"),
        ({"response_format": schema_format({"uniqueItems": True})}, "response_format", "'uniqueItems'"),
        ({"guided_json": {"misspelt": 1}}, "guided_json", "'misspelt'"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "EBNF"),
        ({"guided_choice": []}, "guided_choice", "1 to 1000 choices"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "give one"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "not available together"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "not available together"),
        ({"guided_regex": "a", "bad_words": ["a"]}, "bad_words", "not available together"),
        ({"guided_regex": "a", "tools": DECLARED}, "guided_regex", "together with tools"),
        ({"guided_json": {}, "tools": DECLARED, "tool_choice": "required"}, "guided_json", "demands a call"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(base: str, options: Any, param: str, words: str) -> None:
    body = {"model": "parrot", "messages": [{"role": "user", "content": "x"}], **options}
    reply = httpx.post(f"{base}/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and words in error["message"]


def test_tokenize_counts_what_the_chat_would_send(base: str, client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "x"}]
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    body = {
        "model": "parrot",
        "messages": messages,
        "tools": DECLARED,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    counted = httpx.post(f"{base}/tokenize", json=body).json()["count"]
    reply = client.chat.completions.create(model="parrot", messages=messages, tools=DECLARED, extra_body=extra)
    assert counted == reply.usage.prompt_tokens > 100
    refused = httpx.post(f"{base}/tokenize", json={"model": "parrot", "prompt": "x", "tools": DECLARED})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"


def test_a_grammar_that_gets_too_complex_ends_its_own_answer_only(client: openai.OpenAI) -> None:
    source = "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1} |\n" for i in range(14)) + 'r14: "a"'
    with pytest.raises(openai.BadRequestError, match="can't be followed any further"):
        ask(client, "a" * 500, extra_body={"guided_grammar": source})
    assert ask(client, "aa", extra_body={"guided_grammar": source})[0].message.content == "aa"
