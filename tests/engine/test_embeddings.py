"""/v1/embeddings: vectors of what the model's last layer says of a text, through the OpenAI SDK."""

import base64
import struct

import httpx
import openai
import pytest
import torch

from engine.hosted import HostedModel
from engine.pooling import Pooling
from tests.engine.fake_model import fake_model, fake_tokenizer
from tests.engine.fake_runner import mix
from tests.engine.serving import complete, serving


def expected(text: str, pooling: str = "mean") -> torch.Tensor:
    """[8] of the fake model, computed without blocks, chunks or batches."""
    kv: list[int] = []
    rows = []
    for position, token in enumerate(fake_tokenizer().encode(text, add_special=True)):
        kv.append(mix(token, position, kv[-1] if kv else 0))
        seen = mix(*kv)
        rows.append([(seen >> (7 * i)) % 101 - 50.0 for i in range(8)])
    hidden = torch.tensor(rows)
    return torch.nn.functional.normalize(hidden.mean(0) if pooling == "mean" else hidden[-1], dim=0)


def embed(http: httpx.Client, text: object, **body) -> httpx.Response:
    return http.post("/v1/embeddings", json={"model": "fake", "input": text, **body})


def test_texts_through_the_sdk(url: str) -> None:
    texts = ["one", "another text that is a good deal longer than a block of sixteen", "one"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        for extra in ({}, {"encoding_format": "float"}):  # the SDK asks for base64 by itself
            reply = sdk.embeddings.create(model="fake", input=texts, **extra)
            assert [item.index for item in reply.data] == [0, 1, 2]
            for item, text in zip(reply.data, texts, strict=True):
                torch.testing.assert_close(torch.tensor(item.embedding), expected(text))
            assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, texts))
            account = reply.farthing
            assert account["input_fresh"] == sum(map(len, texts)) and account["input_cached"] == 0
            assert account["prefill_device_seconds"] > 0 and account["kv_block_seconds"] > 0


def test_one_text_as_string_tokens_or_list(http: httpx.Client) -> None:
    tokens = fake_tokenizer().encode("hello", add_special=True)
    found = [embed(http, given).json()["data"] for given in ("hello", ["hello"], tokens, [tokens])]
    assert found[0] == found[1] == found[2] == found[3] and len(found[0]) == 1


def test_last_pooling_dimensions_and_base64(http: httpx.Client) -> None:
    last = embed(http, "last one", pooling="last").json()["data"][0]["embedding"]
    torch.testing.assert_close(torch.tensor(last), expected("last one", "last"))
    short = embed(http, "last one", pooling="last", dimensions=3).json()["data"][0]["embedding"]
    torch.testing.assert_close(torch.tensor(short), torch.nn.functional.normalize(torch.tensor(last[:3]), dim=0))
    packed = embed(http, "last one", pooling="last", encoding_format="base64").json()["data"][0]["embedding"]
    assert list(struct.unpack("<8f", base64.b64decode(packed))) == pytest.approx(last)


def test_long_texts_in_small_steps_under_pressure_beside_answers() -> None:
    """Chunks, preemption and cached blocks leave the vectors what they are, and answers too."""
    model = fake_model(num_blocks=12, budget=16)
    texts = [f"text {i} " * (4 + i) for i in range(10)]
    with serving(model) as url, httpx.Client(base_url=url, timeout=30) as http:
        complete(http, texts[3], 5)
        first = complete(http, "beside", 40).json()["choices"][0]["text"]
        data = embed(http, texts).json()["data"]
        for item, text in zip(data, texts, strict=True):
            torch.testing.assert_close(torch.tensor(item["embedding"]), expected(text))
        assert complete(http, "beside", 40).json()["choices"][0]["text"] == first


def test_pooling_begins_anew_after_a_preemption() -> None:
    hidden = torch.randn(6, 4)
    pooling = Pooling("mean")
    pooling.add(hidden[:4], 0)
    pooling.add(hidden[:2], 0)
    pooling.add(hidden[2:], 2)
    torch.testing.assert_close(pooling.vector, torch.nn.functional.normalize(hidden.mean(0), dim=0))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], "a", 2]}, "input[2]"),
        ({"input": [1, -2]}, "input[0]"),
        ({"input": [1, 97]}, "input"),
        ({"input": "x", "dimensions": 9}, "dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x" * 400}, None),
    ],
)
def test_what_is_refused(http: httpx.Client, body: dict, param: str | None) -> None:
    reply = http.post("/v1/embeddings", json={"model": "fake", **body})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


def test_a_failing_step_is_a_500(http: httpx.Client, model: HostedModel) -> None:
    model.runner.fail_next = RuntimeError("broken")
    assert embed(http, ["a", "b"]).status_code == 500
    assert embed(http, ["a", "b"]).status_code == 200
