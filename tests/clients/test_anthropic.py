"""Anthropic's Python SDK, as it comes from the package index, with the same models behind it."""

from decimal import Decimal
from typing import Any

import anthropic
import pytest

from tests.clients.serving import LARGE, SMALL, Farthing

pytestmark = pytest.mark.model
GREEDY: Any = {"extra_body": {"temperature": 0}}  # the SDK has no argument for it
"""The same text in every run, and never an empty one."""
QUESTION: Any = [{"role": "user", "content": "Name three colours."}]
WEATHER: Any = {
    "name": "weather",
    "description": "What the weather is in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
"""All that a small model can say to it is right, and short."""


@pytest.fixture
def client(farthing: Farthing) -> Any:
    return anthropic.Anthropic(base_url=farthing.url, api_key=farthing.key)


def test_a_message(client: Any) -> None:
    answer = client.messages.create(model=SMALL, max_tokens=12, system="Be brief.", messages=QUESTION, **GREEDY)
    [block] = answer.content
    assert block.type == "text" and block.text
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens <= 12


def test_a_stream_starts_with_the_prompts_tokens(client: Any) -> None:
    with client.messages.stream(model=SMALL, max_tokens=12, messages=QUESTION, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_message()
    starts = [event.message.usage for event in events if event.type == "message_start"]
    texts = [event.text for event in events if event.type == "text"]
    assert "".join(texts) == final.content[0].text != ""
    prompt = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert starts[0].input_tokens + (starts[0].cache_read_input_tokens or 0) == prompt > 0


def test_the_count_is_that_of_the_answer_and_the_cache_is_told(client: Any) -> None:
    messages: Any = [{"role": "user", "content": "Name three colours of the rainbow. " * 8}]
    counted = client.messages.count_tokens(model=SMALL, messages=messages).input_tokens
    usages = [client.messages.create(model=SMALL, max_tokens=4, messages=messages).usage for _ in range(2)]
    for usage in usages:
        assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == counted
    assert usages[1].cache_read_input_tokens >= 16


def test_a_tool_is_called_and_its_result_answered(client: Any) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: Any = {"model": LARGE, "max_tokens": 60, "tools": [WEATHER], **GREEDY}
    asked = client.messages.create(messages=messages, tool_choice={"type": "any"}, **options)
    call = next(block for block in asked.content if block.type == "tool_use")
    assert asked.stop_reason == "tool_use" and call.name == "weather" and call.input.keys() == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 21 degrees."}
    messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=messages, tool_choice={"type": "none"}, **options)
    assert answer.content[0].text


def test_two_calls_whose_fragments_come_interleaved(client: Any) -> None:
    with client.messages.stream(model="scripted", max_tokens=60, messages=QUESTION, tools=[WEATHER]) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [(block.id, block.input) for block in final.content] == [
        ("call_a", {"city": "Paris"}),
        ("call_b", {"city": "Oslo"}),
    ]


def test_wrong_requests_raise_what_the_sdk_has_for_them(client: Any) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="fk-wrong").messages.create(model=SMALL, max_tokens=4, messages=QUESTION)
    with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
        client.messages.create(model="no-such-model", max_tokens=4, messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model=SMALL, max_tokens=4, messages=QUESTION, extra_body={"temperature": -1})


def test_what_a_budget_refuses_is_not_asked_again(farthing: Farthing) -> None:
    key = farthing.new_key(budget=Decimal("0.000001"))
    client = anthropic.Anthropic(base_url=farthing.url, api_key=key.secret, max_retries=3)
    with pytest.raises(anthropic.APIStatusError) as refused:
        client.messages.create(model=SMALL, max_tokens=8, messages=QUESTION)
    assert refused.value.status_code == 402
    farthing.operations(key, 1)


def test_a_bearer_token_does_as_well(farthing: Farthing) -> None:
    client = anthropic.Anthropic(base_url=farthing.url, auth_token=farthing.key, api_key=None)
    assert client.messages.create(model=SMALL, max_tokens=4, messages=QUESTION, **GREEDY).content
