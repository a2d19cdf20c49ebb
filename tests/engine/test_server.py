"""The engine over HTTP, driven by a plain client and by the unmodified OpenAI SDK, with a fake model behind."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from engine.hosted import HostedModel
from tests.engine.fake_model import expected_text, fake_model
from tests.engine.serving import GREEDY, complete, serving


@pytest.fixture(scope="module")
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def frames(response: httpx.Response) -> list[dict]:
    """The JSON of each event; asserts that nothing but `data:` lines was sent and that [DONE] came last."""
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_chat_through_the_sdk(sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=12,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert reply.choices[0].message.content == expected_text("u:hello;a:", 12)
    assert reply.choices[0].message.role == "assistant" and reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (10, 12, 22)
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    account = reply.farthing
    assert account["input_fresh"] == 10 and account["output_text"] == 12 and account["prefill_device_seconds"] > 0


def test_chat_stream_through_the_sdk(sdk: openai.OpenAI) -> None:
    chunks = list(
        sdk.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hello"}], temperature=0, max_completion_tokens=12,
            stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == expected_text("u:hello;a:", 12)
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].farthing["generated_tokens"] == 12
    assert len({c.id for c in chunks}) == 1 and chunks[0].id.startswith("chatcmpl-")


def test_completion_stream_through_the_sdk(sdk: openai.OpenAI) -> None:
    stream = sdk.completions.create(
        model="fake", prompt="abc", temperature=0, max_tokens=9, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks) == expected_text("abc", 9)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_stream_frames_say_usage_as_asked(http: httpx.Client) -> None:
    silent = frames(complete(http, "abc", stream=True))
    assert all("usage" not in frame and "farthing" not in frame for frame in silent)
    asked = frames(complete(http, "abc", stream=True, stream_options={"include_usage": True}))
    assert all(frame["usage"] is None for frame in asked[:-1])
    assert asked[-1]["choices"] == [] and asked[-1]["usage"]["total_tokens"] == 11
    continuous = frames(complete(http, "abc", stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [frame["usage"]["completion_tokens"] for frame in continuous]
    assert counts == sorted(counts) and counts[-1] == 8
    assert all(frame["usage"]["prompt_tokens"] == 3 for frame in continuous)


def test_prompt_as_token_ids_is_the_same_prompt(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"model": "fake", "prompt": "abc"}).json()
    assert ids == {"count": 3, "max_model_len": 400, "tokens": [64, 65, 66]}
    by_text, by_ids = complete(http, "abc").json(), complete(http, ids["tokens"]).json()
    assert by_text["choices"] == by_ids["choices"]


def test_tokenize_counts_what_chat_sends(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "count me"}]
    count = http.post("/tokenize", json={"model": "fake", "messages": messages}).json()["count"]
    reply = http.post("/v1/chat/completions", json={**GREEDY, "messages": messages, "max_tokens": 1}).json()
    assert reply["usage"]["prompt_tokens"] == count == len("u:count me;a:")


def test_second_arrival_reports_hits_to_its_tenant_only(http: httpx.Client) -> None:
    prompt = "the same prompt of fifty characters, word for word"
    tenant, stranger = {"x-farthing-tenant": "a"}, {"x-farthing-tenant": "b"}
    replies = [complete(http, prompt, headers=headers).json() for headers in (tenant, tenant, stranger, None)]
    assert [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in replies] == [0, 48, 0, 0]
    assert len({r["choices"][0]["text"] for r in replies}) == 1
    account = replies[1]["farthing"]
    assert (account["input_fresh"], account["input_cached"]) == (2, 48)


def test_max_tokens_beyond_the_context_is_cut_there(http: httpx.Client) -> None:
    reply = complete(http, "x" * 390, 10**9).json()
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 10


def test_completions_default_to_sixteen_tokens(http: httpx.Client) -> None:
    body = {**GREEDY, "prompt": "abc"}
    assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16


def test_health_models_and_metrics(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    listed = http.get("/v1/models").json()["data"]
    assert {m["id"]: m["max_model_len"] for m in listed} == {"fake": 400, "other": 128}
    complete(http, "measure me")
    time.sleep(0.2)
    metrics = {}
    for line in http.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            metrics[name] = float(value)
    blocks = [metrics[f'farthing_engine_kv_blocks{{model="fake",state="{s}"}}'] for s in ("free", "cached", "held")]
    assert sum(blocks) == 32 and blocks[2] == 0
    device = sum(v for k, v in metrics.items() if k.startswith("farthing_engine_device_seconds_total"))
    wall = metrics["farthing_engine_wall_seconds_total"]
    assert device + metrics["farthing_engine_idle_seconds_total"] == pytest.approx(wall, rel=0.01)
    assert metrics['farthing_engine_requests_total{finish_reason="length",model="fake"}'] >= 1
    assert metrics['farthing_engine_ttft_seconds_count{model="fake"}'] >= 1


def test_unknown_paths_and_methods_have_the_error_shape(http: httpx.Client) -> None:
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/nothing").json()["error"]["code"] == "http_error"
    assert http.get("/v1/completions").status_code == 405


def test_a_server_that_is_loading_says_so() -> None:
    with serving() as url, httpx.Client(base_url=url) as http:
        reply = http.get("/health")
        assert (reply.status_code, reply.json()) == (503, {"status": "loading"})
        assert complete(http, "x").status_code == 503
        assert http.get("/v1/models").status_code == 503


class Slow:
    """Makes a model's steps slow enough to catch a request in the middle."""

    def __init__(self, model: HostedModel, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
        forward = model.runner.forward
        monkeypatch.setattr(model.runner, "forward", lambda batch: (time.sleep(seconds), forward(batch))[1])


def test_abort_ends_the_stream_with_an_account(http: httpx.Client, model, monkeypatch) -> None:
    Slow(model, monkeypatch)
    body = {**GREEDY, "prompt": "abort me", "max_tokens": 300, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with http.stream("POST", "/v1/completions", json=body, headers={"x-farthing-request-id": "r-1"}) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert complete(http, "abort me", headers={"x-farthing-request-id": "r-1"}).status_code == 409
        assert http.post("/v1/abort", json={"id": "r-1"}).status_code == 200
        rest = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
    assert rest[-2]["choices"][0]["finish_reason"] == "abort"
    account = rest[-1]["farthing"]
    assert 3 <= account["generated_tokens"] == account["output_text"] == rest[-1]["usage"]["completion_tokens"] < 50
    assert http.post("/v1/abort", json={"id": "r-1"}).status_code == 404


def test_abort_by_the_id_of_the_reply(http: httpx.Client, model, monkeypatch) -> None:
    Slow(model, monkeypatch)
    with http.stream("POST", "/v1/completions", json={**GREEDY, "prompt": "x", "max_tokens": 300, "stream": True}) as r:
        lines = r.iter_lines()
        first = json.loads(next(lines)[6:])
        assert http.post("/v1/abort", json={"id": first["id"]}).status_code == 200
        assert '"finish_reason":"abort"' in "".join(lines)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(url: str, model, monkeypatch, stream: bool) -> None:
    Slow(model, monkeypatch)
    before = model.finished["abort"]
    body = json.dumps({**GREEDY, "prompt": "leaving soon", "max_tokens": 380, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        deadline = time.monotonic() + 60
        while not model.blocks.held and time.monotonic() < deadline:
            time.sleep(0.005)
        assert model.blocks.held
    while model.finished["abort"] == before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert model.finished["abort"] == before + 1 and model.blocks.held == 0


def test_hundreds_of_clients_that_vanish_leave_nothing_behind(monkeypatch) -> None:
    model = fake_model(num_blocks=200, max_context=400)
    Slow(model, monkeypatch)  # so that none ends before its client vanishes

    async def vanish(port: int, i: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({**GREEDY, "prompt": f"client {i}", "max_tokens": 380, "stream": i % 2 == 0}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        await asyncio.sleep(0.001 * (i % 300))
        writer.transport.abort()

    async def vanish_all(port: int) -> None:
        await asyncio.gather(*(vanish(port, i) for i in range(300)))

    with serving(model) as url:
        asyncio.run(vanish_all(int(url.rsplit(":", 1)[1])))
        deadline = time.monotonic() + 60
        while model.finished.total() < 300 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert model.finished["abort"] == 300 and model.blocks.held == 0
        assert model.blocks.free + model.blocks.cached == 200


def test_a_failing_step_is_a_500_before_the_first_token_and_an_error_frame_after(http, model, monkeypatch) -> None:
    model.runner.fail_next = RuntimeError("broken")
    reply = complete(http, "x", stream=True)
    assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"
    Slow(model, monkeypatch)
    with http.stream("POST", "/v1/completions", json={**GREEDY, "prompt": "x", "max_tokens": 300, "stream": True}) as r:
        lines = r.iter_lines()
        next(lines)
        model.runner.fail_next = RuntimeError("broken")
        assert [line for line in lines if line][-1].startswith('data: {"error":{"message":"The model failed')
    assert complete(http, "x").status_code == 200


def test_many_clients_at_once_get_their_own_answers(url: str) -> None:
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        with httpx.Client(base_url=url, timeout=30) as http:
            reply = complete(http, f"client {i}", 20, stream=True)
            answers[i] = "".join(frame["choices"][0]["text"] for frame in frames(reply))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: expected_text(f"client {i}", 20) for i in range(24)}
