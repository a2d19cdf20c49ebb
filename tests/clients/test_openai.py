"""OpenAI's Python SDK, as it comes from the package index."""

import json
import time
from decimal import Decimal
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.clients.scripted import WIDTH, vector
from tests.clients.serving import LARGE, SMALL, Farthing

pytestmark = pytest.mark.model
QUESTION: Any = [{"role": "user", "content": "Name three colours."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather is in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture
def client(farthing: Farthing) -> OpenAI:
    return OpenAI(base_url=farthing.v1, api_key=farthing.key)


def test_chat(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=SMALL, messages=QUESTION, max_tokens=12, temperature=0)
    answer = raw.parse()
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and 0 < answer.usage.completion_tokens <= 12
    assert len(raw.headers["x-farthing-trace-id"]) == 36


def test_a_stream_and_its_usage(client: OpenAI) -> None:
    options: Any = {"model": SMALL, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_helper_that_puts_a_stream_together(client: OpenAI) -> None:
    with client.chat.completions.stream(model=SMALL, messages=QUESTION, max_tokens=8, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        message = stream.current_completion_snapshot.choices[0].message
    assert message.content == "".join(deltas) != ""


def test_a_tool_is_called_and_its_result_answered(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: Any = {"model": LARGE, "tools": [WEATHER], "max_tokens": 60, "temperature": 0}
    asked = client.chat.completions.create(messages=messages, tool_choice="required", **options).choices[0].message
    assert asked.tool_calls is not None
    call: Any = asked.tool_calls[0]
    assert call.function.name == "weather" and json.loads(call.function.arguments).keys() == {"city"}
    messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}]
    assert client.chat.completions.create(messages=messages, **options).choices[0].message.content


def test_two_calls_whose_fragments_come_interleaved(client: OpenAI) -> None:
    with client.chat.completions.stream(model="scripted", messages=QUESTION, tools=[WEATHER]) as stream:
        for _ in stream:
            pass
        [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    found = [(call.id, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert found == [("call_a", {"city": "Paris"}), ("call_b", {"city": "Oslo"})]


def test_an_answer_in_the_form_of_a_class(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Ada is 36 years old. Answer as JSON."}]
    answer = client.chat.completions.parse(
        model=LARGE, messages=messages, response_format=Person, max_tokens=60, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_text_completions(client: OpenAI) -> None:
    options: Any = {"model": SMALL, "prompt": "One, two, three,", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    assert whole.choices[0].text and "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_embeddings_of_a_real_model(client: OpenAI) -> None:
    found = client.embeddings.create(model=SMALL, input=["a farthing", "a quarter of a penny"])
    assert [len(one.embedding) for one in found.data] == [576, 576]
    assert found.usage.prompt_tokens > 4


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}])  # without one, the SDK asks for base64
def test_embeddings_are_whole_in_either_encoding(client: OpenAI, options: Any) -> None:
    found = client.embeddings.create(model="scripted", input="a farthing", **options).data[0].embedding
    assert len(found) == WIDTH and found == pytest.approx(vector())


def test_a_response(client: OpenAI) -> None:
    answer = client.responses.create(model=SMALL, input="Name three colours.", max_output_tokens=16, temperature=0)
    assert answer.output_text and answer.usage is not None and answer.usage.output_tokens <= 16


def test_a_streamed_response(client: OpenAI) -> None:
    with client.responses.stream(
        model=SMALL, input="Name three colours.", max_output_tokens=16, temperature=0
    ) as stream:
        events: list[Any] = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert events[-1].response.output_text == "".join(deltas) != ""
    assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_response_in_the_form_of_a_class_and_one_that_calls_a_tool(client: OpenAI) -> None:
    parsed = client.responses.parse(
        model=LARGE,
        input="Ada is 36 years old. Answer as JSON.",
        text_format=Person,
        max_output_tokens=60,
        temperature=0,
    )
    assert isinstance(parsed.output_parsed, Person)
    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}
    asked = client.responses.create(
        model=LARGE, input="What is the weather in Paris?", tools=[tool | {"strict": True}], tool_choice="required",
        max_output_tokens=60, temperature=0,
    )  # fmt: skip
    calls: Any = [item for item in asked.output if item.type == "function_call"]
    assert calls and json.loads(calls[0].arguments).keys() == {"city"}


def test_models(client: OpenAI) -> None:
    assert {SMALL, LARGE, "scripted"} <= {model.id for model in client.models.list()}


def test_wrong_requests_raise_what_the_sdk_has_for_them(client: OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="fk-wrong").chat.completions.create(model=SMALL, messages=QUESTION)
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=SMALL, messages=QUESTION, temperature=-1)


def test_what_a_budget_refuses_is_not_asked_again(farthing: Farthing) -> None:
    key = farthing.new_key(budget=Decimal("0.000001"))
    client = OpenAI(base_url=farthing.v1, api_key=key.secret, max_retries=3)
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(model=SMALL, messages=QUESTION, max_tokens=8)
    assert refused.value.status_code == 402
    farthing.operations(key, 1)


def test_a_batch(client: OpenAI) -> None:
    body = {"model": SMALL, "messages": QUESTION, "max_tokens": 8}
    lines = [
        json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        for number in range(3)
    ]
    file = client.files.create(file=("requests.jsonl", "\n".join(lines).encode()), purpose="batch")
    assert file.id in {one.id for one in client.files.list()}
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.output_file_id is not None
    found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert {line["custom_id"] for line in found} == {"line-0", "line-1", "line-2"}
    assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in found)
    assert client.files.delete(file.id).deleted
