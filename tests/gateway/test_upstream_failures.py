"""Upstreams that die, hang, refuse and come back: what the caller sees and what the ledger says."""

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.running import CHAT, Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Scripted, frame


def dying_after(count: int) -> Any:
    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.frame(frame({"role": "assistant", "content": ""}, 0))
        for number in range(count):
            await connection.frame(frame({"content": "word "}, number + 1))
        connection.die()

    return script


async def test_death_in_the_middle_of_a_stream(gateway: Gateway, upstream: Scripted) -> None:
    upstream.script = dying_after(2)
    answer = await gateway.chat(stream=True)
    frames = [line[6:] for line in answer.text.splitlines() if line]
    assert frames[-1] == "[DONE]"
    error = json.loads(frames[-2])["error"]
    assert (error["type"], error["code"]) == ("server_error", "upstream_error")
    row = await gateway.row()
    (attempt,) = row["attempts"]
    assert (row["status"], row["http_status"], attempt["status"]) == ("upstream_error", 200, "upstream_error")
    assert (attempt["output_text"], attempt["input_cached"], attempt["cost"]) == (2, 4, None)

    upstream.script = None
    assert (await gateway.chat()).status_code == 200


async def test_the_sdk_raises_on_the_error_frame(gateway: Gateway, upstream: Scripted) -> None:
    from openai import APIError

    upstream.script = dying_after(1)
    stream = await gateway.sdk.chat.completions.create(stream=True, **CHAT)  # type: ignore[call-overload]
    with pytest.raises(APIError, match="failed in the middle"):
        async for _ in stream:
            pass


async def test_an_error_frame_from_the_upstream(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.frame(frame({"content": "a"}, 1))
        await connection.frame({"error": {"message": "out of memory"}})
        await connection.done()

    upstream.script = script
    answer = await gateway.chat(stream=True)
    assert "out of memory" in answer.text and answer.text.endswith("data: [DONE]\n\n")
    row = await gateway.row()
    assert (row["status"], row["error"]) == ("upstream_error", "out of memory")


@pytest.mark.parametrize("junk", [b"data: {not json}\n\n", b'data: {"choices": 7}\n\n', b"data: \xff\n\n"])
async def test_a_stream_of_junk(gateway: Gateway, upstream: Scripted, junk: bytes) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.frame(frame({"content": "a"}, 1))
        await connection.chunk(junk)
        await connection.done()

    upstream.script = script
    answer = await gateway.chat(stream=True)
    assert '"error"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
    assert (await gateway.row())["status"] == "upstream_error"


async def test_a_hang_ends_with_the_read_timeout(settings: dict[str, Any], upstream: Scripted) -> None:
    async def hang(_: Request, connection: Connection) -> None:
        await connection.writer.wait_closed()

    settings["upstreams"]["engine"]["first_byte_seconds"] = 0.3
    upstream.script = hang
    async with running_gateway(settings) as gateway:
        answers = await asyncio.gather(*(gateway.chat() for _ in range(10)))
        assert {answer.status_code for answer in answers} == {504}
        rows = await gateway.rows(10)
        assert {row["status"] for row in rows} == {"upstream_error"}
        assert [len(row["attempts"]) for row in rows] == [1] * 10
        assert "farthing_requests_in_flight 0.0" in (await gateway.http.get("/metrics")).text


async def test_a_restart_is_waited_for(settings: dict[str, Any], upstream: Scripted) -> None:
    settings["upstreams"]["engine"]["connect_window_seconds"] = 10.0
    async with running_gateway(settings) as gateway:
        await upstream.stop()
        asking = asyncio.create_task(gateway.chat())
        await asyncio.sleep(0.4)
        await upstream.start()
        assert (await asking).status_code == 200
        (attempt,) = (await gateway.row())["attempts"]
        assert attempt["number"] == 1


async def test_a_gateway_that_is_up_before_its_engine(settings: dict[str, Any], upstream: Scripted) -> None:
    settings["upstreams"]["engine"]["connect_window_seconds"] = 10.0
    await upstream.stop()
    async with running_gateway(settings) as gateway:
        asking = asyncio.create_task(gateway.chat())
        await asyncio.sleep(0.4)
        assert not asking.done()
        await upstream.start()
        assert (await asking).status_code == 200
        (attempt,) = (await gateway.row())["attempts"]
        assert (attempt["number"], attempt["status"]) == (1, "ok")


async def test_an_upstream_that_stays_away(gateway: Gateway, upstream: Scripted) -> None:
    await upstream.stop()
    answer = await gateway.chat()
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "engine cannot be reached" in answer.json()["error"]["message"]
    row = await gateway.row()
    assert (row["status"], row["http_status"], row["attempts"], row["billed"]) == ("upstream_error", 503, [], 0)


async def test_two_failed_tries_and_a_success_are_one_operation(gateway: Gateway, upstream: Scripted) -> None:
    async def script(request: Request, connection: Connection) -> None:
        if len(upstream.chats) <= 2:
            await connection.json({"error": {"message": "loading"}}, 503)
        else:
            await upstream.chat(request, connection)

    upstream.script = script
    assert (await gateway.chat(model="hosted")).status_code == 200
    row = await gateway.row()
    assert row["status"] == "ok"
    assert [(a["number"], a["status"], a["http_status"]) for a in row["attempts"]] == [
        (1, "upstream_error", 503),
        (2, "upstream_error", 503),
        (3, "ok", 200),
    ]
    assert [a["billed"] for a in row["attempts"]][:2] == [0, 0]
    assert row["billed"] == row["attempts"][2]["billed"]


async def test_an_engine_that_loads_is_waited_for(gateway: Gateway, upstream: Scripted) -> None:
    async def script(request: Request, connection: Connection) -> None:
        if len(upstream.chats) <= 2:
            await connection.json({"error": {"message": "loading"}}, 503)
        else:
            await upstream.chat(request, connection)

    upstream.script = script
    assert (await gateway.chat()).status_code == 200
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["number"], attempt["status"]) == (1, "ok")


async def test_an_engine_that_never_finishes_loading(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.json({"error": {"message": "loading"}}, 503)

    upstream.script = script
    answer = await gateway.chat()
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert "engine is not ready" in answer.json()["error"]["message"]
    row = await gateway.row()
    assert (row["status"], row["attempts"], row["billed"]) == ("upstream_error", [], 0)


async def test_a_connection_cut_without_an_answer_is_tried_once_more(gateway: Gateway, upstream: Scripted) -> None:
    async def script(request: Request, connection: Connection) -> None:
        if len(upstream.chats) == 1:
            connection.die()
        else:
            await upstream.chat(request, connection)

    upstream.script = script
    assert (await gateway.chat()).status_code == 200
    row = await gateway.row()
    assert [a["status"] for a in row["attempts"]] == ["upstream_error", "ok"]
    assert row["cost"] is None, "what the first attempt cost is not known"
    assert len({request.headers["x-farthing-request-id"] for request in upstream.chats}) == 2


async def test_a_request_that_waited_long_in_a_killed_engine_is_tried_again(
    gateway: Gateway, upstream: Scripted
) -> None:
    stopped = asyncio.Event()

    async def script(request: Request, connection: Connection) -> None:
        if len(upstream.chats) > 1:
            await upstream.chat(request, connection)
        else:
            await asyncio.sleep(1.2)  # longer than the window in which a restart is waited for
            await upstream.stop()
            connection.die()
            stopped.set()

    upstream.script = script
    asking = asyncio.create_task(gateway.chat())
    await stopped.wait()
    await asyncio.sleep(0.3)
    await upstream.start()
    assert (await asking).status_code == 200
    assert [a["status"] for a in (await gateway.row())["attempts"]] == ["upstream_error", "ok"]


async def test_a_request_that_kills_the_engine_is_not_tried_for_ever(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        connection.die()

    upstream.script = script
    answer = await gateway.chat()
    assert answer.status_code == 502
    assert len(upstream.chats) == 2
    assert [a["status"] for a in (await gateway.row())["attempts"]] == ["upstream_error"] * 2


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429])
async def test_refusals_that_concern_the_caller_pass_through(gateway: Gateway, upstream: Scripted, status: int) -> None:
    body = {"error": {"message": "no images here", "type": "x", "param": "messages", "code": "y", "extra": 1}}

    async def script(_: Request, connection: Connection) -> None:
        await connection.json(body, status, "retry-after: 7\r\n")

    upstream.script = script
    answer = await gateway.chat(stream=True)
    assert (answer.status_code, answer.json(), answer.headers["retry-after"]) == (status, body, "7")
    row = await gateway.row()
    assert (row["status"], row["http_status"], row["error"], row["billed"]) == ("invalid", status, "no images here", 0)
    assert row["attempts"][0]["http_status"] == status


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (429, "rate_limit_exceeded", {"retry-after": "1"}),
        (429, "insufficient_quota", {"x-should-retry": "false"}),
        (402, "insufficient_balance", {"x-should-retry": "false"}),
    ],
)
async def test_who_came_too_often_or_has_no_more_is_told_whether_to_ask_again(
    gateway: Gateway, upstream: Scripted, status: int, code: str, told: dict[str, str]
) -> None:
    """Also where the upstream does not say: an SDK would ask three times."""

    async def script(_: Request, connection: Connection) -> None:
        await connection.json({"error": {"message": "no", "code": code}}, status)

    upstream.script = script
    answer = await gateway.chat()
    assert answer.status_code == (502 if status == 402 else status)
    assert {name: answer.headers.get(name) for name in told} == told
    assert len(answer.headers.keys() & {"retry-after", "x-should-retry"}) == 1


@pytest.mark.parametrize("status", [401, 403, 500, 301])
async def test_refusals_that_concern_the_operator_become_502(gateway: Gateway, upstream: Scripted, status: int) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.json({"error": {"message": "secret operator detail"}}, status)

    upstream.script = script
    answer = await gateway.chat()
    assert answer.status_code == 502
    assert "secret operator detail" not in answer.text
    assert (await gateway.row())["status"] == "upstream_error"


async def test_half_a_whole_answer(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
        connection.die()

    upstream.script = script
    assert (await gateway.chat()).status_code == 502
    row = await gateway.row()
    assert (row["status"], row["billed"]) == ("upstream_error", 0)
