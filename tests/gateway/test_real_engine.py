"""The gateway in front of the real engine process and the real small model."""

import asyncio
import base64
import contextlib
import json
import os
import re
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic

from billing.budgets import set_budget
from tests.gateway.batching import request, results, start, until
from tests.gateway.running import Gateway, configuration, running_gateway

pytestmark = pytest.mark.model
QUESTION = [{"role": "user", "content": "Name three colours."}]


async def free_port() -> int:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = int(server.sockets[0].getsockname()[1])
    server.close()
    await server.wait_closed()
    return port


class Engine:
    """`python -m engine serve` on a port of its own."""

    def __init__(self, model: Path, port: int) -> None:
        self._model = model
        self._port = port
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"http://127.0.0.1:{port}/v1"

    async def start(self) -> None:
        arguments = ["-m", "engine", "serve", str(self._model), "--host", "127.0.0.1", "--port", str(self._port)]
        self._process = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=os.environ.copy())

    async def ready(self) -> str:
        """The name of its model, once it serves."""
        async with httpx.AsyncClient(trust_env=False) as http:
            for _ in range(600):
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get(self.url.removesuffix("/v1") + "/health")).status_code == 200:
                        return str((await http.get(f"{self.url}/models")).json()["data"][0]["id"])
                await asyncio.sleep(0.1)
        raise AssertionError("the engine did not become ready")

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()


@pytest.fixture(scope="session")
async def engine(small_model: Path) -> AsyncIterator[Engine]:
    engine = Engine(small_model, await free_port())
    await engine.start()
    yield engine
    await engine.kill()


@pytest.fixture
async def gateway(engine: Engine, database_url: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    name = await engine.ready()
    settings: dict[str, Any] = configuration(engine.url, database_url, tmp_path)
    settings["models"]["tiny"]["upstreams"] = [{"upstream": "engine", "upstream_model": name}]
    settings["upstreams"]["engine"]["connect_window_seconds"] = 60.0
    async with running_gateway(settings) as running:
        yield running


async def test_a_whole_answer_and_its_prefix_cached_the_second_time(gateway: Gateway) -> None:
    messages: Any = [{"role": "user", "content": "Name three colours. " * 10}]
    for _ in range(2):
        answer = await gateway.sdk.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
        assert answer.choices[0].message.content
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    first, second = await gateway.rows(2)
    for row in (first, second):
        (attempt,) = row["attempts"]
        tokens = attempt["input_fresh"] + attempt["input_cached"] + attempt["input_cache_write"]
        assert tokens == answer.usage.prompt_tokens
        assert attempt["usage_source"] == "engine" and attempt["decode_device_seconds"] > 0
        assert row["cost"] > 0 and row["billed"] > 0
    assert second["attempts"][0]["input_cached"] >= 16
    assert second["attempts"][0]["input_cached"] == answer.usage.prompt_tokens_details.cached_tokens
    assert second["billed"] < first["billed"]


async def test_a_stream_has_the_same_text_as_the_whole_answer(gateway: Gateway) -> None:
    options: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = await gateway.sdk.chat.completions.create(**options)
    usage_options = {"include_usage": True}
    stream = await gateway.sdk.chat.completions.create(**options, stream=True, stream_options=usage_options)
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


async def test_a_caller_that_leaves_mid_stream(gateway: Gateway) -> None:
    async with gateway.raw_chat(messages=QUESTION, stream=True, max_tokens=1500, ignore_eos=True) as (reader, _):
        seen = 0
        while seen < 3:
            line = await asyncio.wait_for(reader.readline(), 20)
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                seen += 1
    row = await gateway.row()
    (attempt,) = row["attempts"]
    assert (row["status"], row["finish_reason"], attempt["usage_source"]) == ("client_closed", "abort", "engine")
    assert 3 <= attempt["output_text"] <= attempt["generated_tokens"] < 1000
    assert row["cost"] > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": "hello " * 20_000}]}, "context of 8192"),
        ({"logit_bias": {"99999999": 5}}, "only ids from 0 to 49151"),
    ],
)
async def test_what_the_engine_refuses(gateway: Gateway, changes: dict[str, Any], said: str) -> None:
    answer = await gateway.chat(**changes)
    assert answer.status_code == 400
    assert said in answer.text
    assert (await gateway.row())["status"] == "invalid"


async def test_a_prompt_over_the_context_is_refused_at_once_with_both_numbers(gateway: Gateway) -> None:
    began = time.monotonic()
    answer = await gateway.chat(messages=[{"role": "user", "content": "hello " * 200_000}])
    assert answer.status_code == 400 and time.monotonic() - began < 10
    message = answer.json()["error"]["message"]
    assert re.search(r"has at least 1\d{4} tokens, but .* has a context of 8192 tokens", message)


async def test_a_billion_tokens_are_asked_for_and_the_model_ends_it(gateway: Gateway) -> None:
    answer = await gateway.chat(messages=QUESTION, temperature=0, max_tokens=10**9, stop=["e"])
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_a_budget_counts_the_prompt_with_the_engine(gateway: Gateway) -> None:
    async with gateway.engine.begin() as connection:
        key = gateway.people.key
        await set_budget(connection, "key", key, "none", Decimal("0.0006"), currency="USD")
    answer = await gateway.chat(messages=QUESTION, ignore_eos=True)
    assert answer.status_code == 200
    row = await gateway.row()
    (attempt,) = row["attempts"]
    prompt = attempt["input_fresh"] + attempt["input_cached"]
    assert attempt["output_text"] == (600 - 10 * prompt) // 20, "the budget capped the answer"
    assert (await gateway.chat(messages=QUESTION)).status_code in (200, 402)


async def test_the_engine_killed_mid_stream_and_restarted(gateway: Gateway, engine: Engine) -> None:
    options: Any = {"model": "tiny", "messages": QUESTION, "stream": True, "max_tokens": 1500}
    body = json.dumps(options | {"ignore_eos": True}).encode()
    async with gateway.http.stream("POST", "/v1/chat/completions", content=body) as answer:
        lines = answer.aiter_lines()
        seen: list[str] = []
        while len([line for line in seen if '"content"' in line]) < 4:
            seen.append(await anext(lines))
        await engine.kill()
        seen += [line async for line in lines if line]
    assert seen[-1] == "data: [DONE]"
    assert json.loads(seen[-2][6:])["error"]["code"] == "upstream_error"
    await engine.start()
    assert (await gateway.chat(max_tokens=4)).status_code == 200
    first, second = await gateway.rows(2)
    assert (first["status"], second["status"]) == ("upstream_error", "ok")
    assert first["attempts"][0]["output_text"] >= 2


async def test_the_engine_killed_before_it_answered_and_restarted(gateway: Gateway, engine: Engine) -> None:
    """What has not begun to stream is asked again, of the engine that comes up."""
    asked = [
        asyncio.create_task(
            gateway.chat(messages=[{"role": "user", "content": text * 400}], max_tokens=4, stream=stream)
        )
        for text, stream in (("Name three colours. ", False), ("Count to a hundred. ", True))
    ]  # seconds of prefill each
    async with httpx.AsyncClient(trust_env=False) as http:
        there = 0.0
        while there < 2:
            metrics = (await http.get(engine.url.removesuffix("/v1") + "/metrics")).text
            there = sum(float(count) for count in re.findall(r"^farthing_engine_sequences{.*} (.*)$", metrics, re.M))
            assert not any(task.done() for task in asked)
    await engine.kill()
    await engine.start()
    whole, stream = await asyncio.wait_for(asyncio.gather(*asked), 90)
    assert whole.json()["usage"]["completion_tokens"] > 0 and stream.text.endswith("data: [DONE]\n\n")
    for row in await gateway.rows(2):
        assert (row["status"], [a["status"] for a in row["attempts"]]) == ("ok", ["upstream_error", "ok"])


async def test_anthropic_s_client_and_its_exact_count(gateway: Gateway) -> None:
    messages: Any = QUESTION
    async with AsyncAnthropic(base_url=gateway.url, api_key=gateway.people.secret, max_retries=0) as client:
        count = (await client.messages.count_tokens(model="tiny", messages=messages, system="Be brief.")).input_tokens
        async with client.messages.stream(
            model="tiny", messages=messages, system="Be brief.", max_tokens=8, extra_body={"temperature": 0}
        ) as events:
            first = await anext(aiter(events))
            message = await events.get_final_message()
        whole = await client.messages.create(
            model="tiny", messages=messages, system="Be brief.", max_tokens=8, extra_body={"temperature": 0, "top_k": 5}
        )
    assert first.type == "message_start"
    for usage in (first.message.usage, message.usage, whole.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 8
    assert message.content[0].type == "text" and whole.content[0].type == "text"
    assert message.content[0].text == whole.content[0].text


async def test_openai_s_other_formats(gateway: Gateway) -> None:
    sdk = gateway.sdk
    async with sdk.responses.stream(
        model="tiny", input="Name three colours.", instructions="Be brief.", max_output_tokens=8, temperature=0
    ) as events:
        response = [event async for event in events][-1].response  # type: ignore[union-attr]
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    chat = await sdk.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three colours."}],
        max_tokens=8,
        temperature=0,
    )
    assert response.output_text == chat.choices[0].message.content
    text = await sdk.completions.create(model="tiny", prompt="Red, green,", max_tokens=4, temperature=0)
    assert text.choices[0].text and text.usage is not None and text.usage.completion_tokens == 4
    numbers = [
        await sdk.embeddings.create(model="tiny", input="a", encoding_format=form) for form in ("float", "base64")
    ]
    plain, packed = (reply.data[0].embedding for reply in numbers)
    assert plain == pytest.approx(list(struct.unpack(f"<{len(plain)}f", base64.b64decode(str(packed)))), abs=1e-6)
    rows = await gateway.rows(5)
    assert {row["status"] for row in rows} == {"ok"}


async def test_batches_of_every_endpoint(gateway: Gateway) -> None:
    sdk = gateway.sdk
    bodies: dict[Any, tuple[dict[str, Any], Callable[[Any], Any]]] = {
        "/v1/chat/completions": (
            {"messages": QUESTION, "max_tokens": 16},
            lambda body: body["choices"][0]["message"]["content"],
        ),
        "/v1/completions": ({"prompt": "One, two,"}, lambda body: body["choices"][0]["text"]),
        "/v1/embeddings": ({"input": "three"}, lambda body: body["data"][0]["embedding"][0]),
        "/v1/responses": (
            {"input": "Hello.", "max_output_tokens": 16},
            lambda body: body["output"][0]["content"][0]["text"],
        ),
    }
    for endpoint, (body, text) in bodies.items():
        lines: list[Any] = [request(str(n), url=endpoint) | {"body": {"model": "tiny"} | body} for n in range(3)]
        ended = await until(sdk, await start(sdk, lines, endpoint))
        assert ended.request_counts is not None and ended.request_counts.completed == 3, ended
        assert ended.usage is not None and ended.usage.input_tokens > 0
        found = await results(sdk, ended.output_file_id)
        assert [line["custom_id"] for line in found] == ["0", "1", "2"]
        assert all(text(line["response"]["body"]) for line in found)
