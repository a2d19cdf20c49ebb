"""The happy path with the unmodified OpenAI SDK, over a real socket, down to the ledger's rows."""

import json
from decimal import Decimal
from typing import Any

import pytest

from tests.gateway.running import CHAT, Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Scripted, frame

MESSAGES: Any = CHAT["messages"]
BILLED = Decimal("0.000124")  # 6 fresh at 10 + 4 cached at 1 + 3 output at 20, per million


async def lines(gateway: Gateway, **changes: Any) -> list[str]:
    """The stream's lines as they are on the wire."""
    answer = await gateway.chat(stream=True, **changes)
    assert answer.status_code == 200
    return answer.text.splitlines()


def payloads(stream: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream if line.startswith("data: {")]


async def test_a_whole_answer(gateway: Gateway) -> None:
    raw = await gateway.sdk.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES, user="ada@work")
    answer = raw.parse()
    assert answer.choices[0].message.content == "Hello world"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (10, 4)
    assert raw.headers["x-farthing-model"] == "tiny"
    assert raw.headers["x-farthing-route"] == "direct"
    assert raw.headers["x-farthing-cached-tokens"] == "4"
    assert Decimal(raw.headers["x-farthing-cost"]) == BILLED
    assert "farthing" not in json.loads(raw.content)

    row = await gateway.row()
    assert str(row["id"]) == raw.headers["x-farthing-trace-id"]
    assert (row["org_id"], row["team_id"]) == (gateway.people.org, gateway.people.team)
    assert (row["user_id"], row["key_id"]) == (gateway.people.user, gateway.people.key)
    assert (row["status"], row["http_status"], row["finish_reason"]) == ("ok", 200, "stop")
    assert (row["requested_model"], row["model"], row["stream"]) == ("tiny", "tiny", False)
    assert row["tags"] == {"user": "ada@work"}
    assert row["billed"] == BILLED
    assert row["cost"] == Decimal("0.005")  # 2 + 3 device seconds at 3.60 an hour
    (attempt,) = row["attempts"]
    assert (attempt["input_fresh"], attempt["input_cached"], attempt["output_text"]) == (6, 4, 3)
    assert (attempt["usage_source"], attempt["upstream"], attempt["http_status"]) == ("engine", "engine", 200)
    assert (attempt["prefill_device_seconds"], attempt["queue_seconds"]) == (2.0, 0.25)
    assert attempt["price_version_id"] is not None and attempt["cost_version_id"] is not None


async def test_a_stream_as_the_sdk_reads_it(gateway: Gateway) -> None:
    stream = await gateway.sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello world"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    row = await gateway.row()
    assert (row["status"], row["stream"], row["billed"]) == ("ok", True, BILLED)
    assert row["ttft_seconds"] is not None


@pytest.mark.parametrize("options", [{}, {"stream_options": {}}, {"stream_options": None}])
async def test_usage_is_hidden_when_not_asked_for(
    gateway: Gateway, upstream: Scripted, options: dict[str, Any]
) -> None:
    wire = await lines(gateway, **options)
    assert "usage" not in "".join(wire)
    assert "farthing" not in "".join(wire)
    assert not [line for line in wire if line.startswith(("id:", "retry:", "event:"))]
    assert wire[-2:] == ["data: [DONE]", ""] or wire[-1] == "data: [DONE]"
    asked = upstream.chats[0].body["stream_options"]
    assert asked == {"include_usage": True, "continuous_usage_stats": True}


async def test_usage_comes_once_and_last_when_asked_for(gateway: Gateway) -> None:
    frames = payloads(await lines(gateway, stream_options={"include_usage": True}))
    *before, last = frames
    assert last["choices"] == [] and last["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert all(frame["usage"] is None for frame in before)
    assert before[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("farthing" not in frame for frame in frames)


async def test_usage_on_the_last_choice_still_makes_one_usage_chunk(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.frame({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
        await connection.frame(frame({}, 1, "stop"))
        await connection.done()

    upstream.script = script
    frames = payloads(await lines(gateway, stream_options={"include_usage": True}, model="hosted"))
    assert [len(f["choices"]) for f in frames] == [1, 1, 0]
    assert frames[-1]["usage"]["completion_tokens"] == 1
    assert (await gateway.row())["attempts"][0]["usage_source"] == "upstream"


async def test_characters_split_anywhere_arrive_whole(gateway: Gateway, upstream: Scripted) -> None:
    payload = (
        b'data: {"choices":[{"index":0,"delta":{"content":"' + "你好🙂".encode() + b'"},"finish_reason":null}]}\r\n\r\n'
    )

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        for byte in payload:
            await connection.chunk(bytes([byte]))
        await connection.frame(frame({}, 3, "stop"))
        await connection.done()

    upstream.script = script
    frames = payloads(await lines(gateway))
    assert frames[0]["choices"][0]["delta"]["content"] == "你好🙂"


async def test_comments_ids_and_retry_lines_are_left_out(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.chunk(b": ping\n\nid: 7\nretry: 10\nevent: message\n")
        await connection.frame(frame({"content": "a"}, 1))
        await connection.frame(frame({}, 1, "stop"))
        await connection.done()

    upstream.script = script
    wire = await lines(gateway)
    assert all(line == "" or line.startswith("data: ") for line in wire)


async def test_unknown_fields_are_forwarded_byte_for_byte(gateway: Gateway, upstream: Scripted) -> None:
    odd = b'"odd":{"a": 1.10, "b":[1e400,123456789012345678901234567890], "c":"\\u4f60"}'
    answer = await gateway.send(b'{"model":"tiny","messages":[{"role":"user","content":"hi","x":1}],' + odd + b"}")
    assert answer.status_code == 200
    assert odd in upstream.chats[0].raw


async def test_who_and_whence_reach_the_engine(gateway: Gateway, upstream: Scripted) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    context = {"traceparent": parent, "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"}
    answer = await gateway.http.post("/v1/chat/completions", json=CHAT, headers=context)
    sent = upstream.chats[0].headers
    assert sent["x-farthing-tenant"] == str(gateway.people.org)
    assert sent["x-farthing-request-id"] == answer.headers["x-farthing-trace-id"] + ".1"
    assert {name: sent[name] for name in context} == context
    assert "authorization" not in sent


@pytest.mark.parametrize(
    ("model", "prompt", "answering", "route"),
    [
        ("auto", "hi", "tiny", "auto/small"),
        ("auto", "Prove that sqrt(2) is irrational.", "big", "auto/large"),
        ("small", "Prove that sqrt(2) is irrational.", "tiny", "small"),
        ("large", "hi", "big", "large"),
        ("big", "hi", "big", "direct"),
    ],
)
async def test_the_name_decides_the_model(
    gateway: Gateway, upstream: Scripted, model: str, prompt: str, answering: str, route: str
) -> None:
    answer = await gateway.chat(model=model, messages=[{"role": "user", "content": prompt}])
    assert (answer.headers["x-farthing-model"], answer.headers["x-farthing-route"]) == (answering, route)
    assert upstream.chats[0].body["model"] == answering
    row = await gateway.row()
    assert (row["model"], row["requested_model"]) == (answering, model)
    assert (row["route_score"] is not None) == (model == "auto")
    assert bool(row["route_reasons"]) == (model == "auto")


async def test_the_threshold_comes_from_the_configuration(settings: dict[str, Any]) -> None:
    settings["router"] = {"threshold": 0.0}
    async with running_gateway(settings) as gateway:
        answer = await gateway.chat(model="auto")
        assert answer.headers["x-farthing-route"] == "auto/large"
        assert (await gateway.row())["route_reasons"] == ["no cue"]


async def test_models_are_listed(gateway: Gateway) -> None:
    names = [model.id async for model in gateway.sdk.models.list()]
    assert names == ["auto", "small", "large", "tiny", "big", "gratis", "hosted"]


async def test_a_configured_model_that_the_engine_has_not_loaded_is_not_listed(
    gateway: Gateway, upstream: Scripted
) -> None:
    upstream.loaded = ["tiny", "other"]
    names = [model.id async for model in gateway.sdk.models.list()]
    assert names == ["auto", "small", "large", "tiny", "hosted"]


async def test_a_hosted_upstream_gets_its_own_name_and_no_engine_extras(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        message = {"role": "assistant", "content": "a"}
        usage = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13, "prompt_tokens_details": None}
        await connection.json({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})

    upstream.script = script
    answer = await gateway.chat(model="hosted")
    assert answer.status_code == 200
    request = upstream.chats[0]
    assert request.body["model"] == "vendor-1"
    assert not [name for name in request.headers if name.startswith("x-farthing")]
    row = await gateway.row()
    assert row["cost"] == row["billed"] == Decimal("0.00014")
    assert row["attempts"][0]["usage_source"] == "upstream"


async def test_an_unpriced_model_has_no_charge_rather_than_a_zero(gateway: Gateway) -> None:
    answer = await gateway.chat(model="gratis")
    assert "x-farthing-cost" not in answer.headers
    row = await gateway.row()
    assert row["billed"] is None
    assert row["cost"] == Decimal("0.005")


async def test_an_upstream_that_reports_nothing_is_estimated(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        message = {"role": "assistant", "content": "a" * 40}
        await connection.json({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    upstream.script = script
    await gateway.chat(model="hosted", messages=[{"role": "user", "content": "b" * 80}])
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["usage_source"], attempt["input_fresh"], attempt["output_text"]) == ("estimated", 20, 10)


async def test_health(gateway: Gateway, upstream: Scripted) -> None:
    assert (await gateway.http.get("/health/live")).status_code == 200
    assert (await gateway.http.get("/health/ready")).status_code == 200
    upstream.healthy = False
    answer = await gateway.http.get("/health/ready")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == {"upstream engine": "answers 503 to a health check"}


async def test_metrics(gateway: Gateway) -> None:
    await gateway.chat()
    text = (await gateway.http.get("/metrics")).text
    assert 'farthing_operations_total{model="tiny",status="ok"} 1.0' in text
    assert 'farthing_tokens_total{model="tiny",token_class="input_cached"} 4.0' in text


async def test_the_dashboard_is_mounted(gateway: Gateway) -> None:
    answer = await gateway.http.get("/dashboard/sign-in")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert (await gateway.http.get("/dashboard")).status_code in (302, 303)


async def test_a_model_name_outside_latin(settings: dict[str, Any]) -> None:
    settings["models"]["千问"] = settings["models"]["tiny"]
    async with running_gateway(settings) as gateway:
        answer = await gateway.chat(model="千问")
        assert answer.status_code == 200
        assert dict(answer.headers.raw)[b"x-farthing-model"].decode() == "千问"
        assert (await gateway.row())["model"] == "千问"


@pytest.mark.parametrize(
    ("usage", "fresh", "cached", "flag"),
    [
        ({"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 40}}, 12, 0, "exceed prompt_tokens 12"),
        ({"prompt_tokens": 12, "total_tokens": 99}, 12, 0, "total_tokens is 99"),
        ({"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": -5}}, 12, 0, "cached_tokens is -5"),
    ],
)
async def test_inconsistent_usage_is_flagged_and_earns_no_discount(
    gateway: Gateway, upstream: Scripted, usage: dict[str, Any], fresh: int, cached: int, flag: str
) -> None:
    async def script(_: Request, connection: Connection) -> None:
        message = {"role": "assistant", "content": "Hi"}
        reported = {"completion_tokens": 1, **usage}
        await connection.json(
            {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": reported}
        )

    upstream.script = script
    await gateway.chat(model="hosted")
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["input_fresh"], attempt["input_cached"], attempt["output_text"]) == (fresh, cached, 1)
    assert flag in attempt["usage_flag"]
