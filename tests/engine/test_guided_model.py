"""Forms of answers with the real small model over HTTP: every one of 32 at once follows its own schema."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from serving import serving

from engine.hosted import HostedModel
from engine.runner import load
from engine.tokenizer import load_tokenizer

pytestmark = pytest.mark.model


def record(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


NAME = {"type": "string", "maxLength": 12}
AGE = {"type": "integer", "minimum": 0, "maximum": 120}
SCHEMAS = [
    record(name=NAME, age=AGE),
    record(colour={"enum": ["red", "grün", "青"]}, on={"type": "boolean"}),
    record(tags={"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3}),
    record(day={"type": "string", "format": "date"}),
    {"type": "array", "items": AGE, "minItems": 2, "maxItems": 4},
    record(point=record(x=AGE, y=AGE), note={"anyOf": [{"type": "null"}, NAME]}),
    {
        "$ref": "#/$defs/pair",
        "$defs": {
            "pair": record(a={"$ref": "#/$defs/word"}, b=AGE),
            "word": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        },
    },
    {"anyOf": [record(name=NAME), record(age=AGE)]},
]


@pytest.fixture(scope="module")
def client(small_model: Path) -> Iterator[openai.OpenAI]:
    model = HostedModel("small", load(small_model, "int8"), load_tokenizer(small_model), 600, 512)
    with serving(model) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=240) as client:
        yield client


def test_32_answers_at_once_parse_and_validate(client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[Any, str, str]:
        schema = SCHEMAS[number % len(SCHEMAS)]
        reply = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": f"Invent something, number {number}. Answer in JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            temperature=1.0,
            seed=number,
            max_tokens=200,
        )
        return schema, reply.choices[0].message.content or "", reply.choices[0].finish_reason

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    for schema, text, finish in answers:
        assert finish == "stop"
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker(["date"]))
    assert len({text for _, text, _ in answers}) > 16


def test_guided_and_free_answers_share_steps_without_changing_each_other(client: openai.OpenAI) -> None:
    def ask(options: dict[str, Any]) -> str | None:
        messages = [{"role": "user", "content": "Name a fruit."}]
        reply = client.chat.completions.create(
            model="small", messages=messages, temperature=0, max_tokens=12, extra_body=options
        )
        return reply.choices[0].message.content

    free, choice = {}, {"guided_choice": ["apple", "a long list of fruit"]}
    alone = [ask(free), ask(choice)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, [free, choice, free, choice]))
    assert together[1::2] == [alone[1]] * 2 and alone[1] in choice["guided_choice"]
    assert all(text and text not in choice["guided_choice"] for text in together[::2])
