"""Requests that are wrong: a clear sentence, OpenAI's error shape, one row `invalid`, and nothing computed."""

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.running import CHAT, Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Scripted

HI = '"messages":[{"role":"user","content":"hi"}]'


MALFORMED: list[tuple[str | bytes, str | None, str]] = [
    ("", None, "not valid JSON: it ends too early (byte 0)"),
    ("{", None, "it ends too early (byte 1)"),
    ("[1]", None, "must be a JSON object"),
    ('{"model": "tiny",}', None, "trailing comma in object (byte 17)"),
    ('{"model": "tiny", "temperature": NaN, ' + HI + "}", None, "invalid character (byte 33)"),
    ('{"model": "tiny", "x": Infinity}', None, "invalid character (byte 23)"),
    (b'{"model": "\xff"}', None, "not valid UTF-8 at byte 11"),
    (b'{"model": "tiny", "odd": "\xff"}', None, "not valid UTF-8 at byte 26"),
    ("{" + HI + "}", "model", "`model` is required"),
    ('{"model": null, ' + HI + "}", "model", "`model` is required"),
    ('{"model": 5, ' + HI + "}", "model", "`model` must be a string"),
    ('{"model": "tiny"}', "messages", "`messages` is required"),
    ('{"model": "tiny", "messages": []}', "messages", "at least one message"),
    ('{"model": "tiny", "messages": "hi"}', "messages", "an array of message objects"),
    ('{"model": "tiny", "messages": ["hi"]}', "messages", "an array of message objects"),
    ('{"model": "tiny", "messages": [{"content": "\\ud800"}]}', None, "half of a surrogate pair"),
    ('{"model": "tiny", "messages": [{"content": "a\\ud800b"}], "max_tokens": 5}', None, "half of a surrogate pair"),
    ('{"model": "tiny", "stop": "\\udc00", ' + HI + "}", None, "half of a surrogate pair"),
    ('{"model": "tiny", "stop": "\\u00', None, "escape is incomplete"),
    ('{"model": "tiny", "stream": "yes", ' + HI + "}", "stream", "true or false"),
    ('{"model": "tiny", "stream_options": 1, ' + HI + "}", "stream_options", "an object"),
    ('{"model": "tiny", "max_tokens": 1.5, ' + HI + "}", "max_tokens", "an integer"),
    ('{"model": "tiny", "max_tokens": "9", ' + HI + "}", "max_tokens", "an integer"),
    ('{"model": "tiny", "n": 0, ' + HI + "}", "n", "at least 1"),
    ('{"model": "tiny", "user": 7, ' + HI + "}", "user", "a string"),
    ('{"model": "tiny", "messages": ' + "[" * 100_000, None, "nested too deeply"),
]
"""(body, the parameter named, a part of the sentence)"""


async def test_malformed_bodies(gateway: Gateway, upstream: Scripted) -> None:
    for body, param, said in MALFORMED:
        answer = await gateway.send(body if isinstance(body, bytes) else body.encode())
        assert answer.status_code == 400, said
        error = answer.json()["error"]
        assert said in error["message"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert answer.headers["x-farthing-trace-id"]
    for row in await gateway.rows(len(MALFORMED)):
        assert (row["status"], row["http_status"], row["attempts"], row["billed"]) == ("invalid", 400, [], 0)
    assert not upstream.chats


async def test_no_such_model_names_what_exists(gateway: Gateway) -> None:
    answer = await gateway.chat(model="gpt-9\u0000")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert "auto, small, large, tiny, big, gratis, hosted" in error["message"]
    row = await gateway.row()
    assert (row["status"], row["requested_model"], row["model"]) == ("invalid", "gpt-9�", None)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"max_tokens": 10**9},
        {"max_tokens": -1},
        {"temperature": -0.5},
        {"messages": [{"role": "wizard", "content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {"messages": [{"role": "user", "content": "hi " * 2000}]},
    ],
)
async def test_what_the_engine_refuses_passes_through(
    gateway: Gateway, upstream: Scripted, changes: dict[str, Any]
) -> None:
    """The gateway does not guess what an upstream supports: the value arrives unchanged, and so does the refusal."""
    refusal = {"error": {"message": "no", "type": "invalid_request_error", "param": "p", "code": None}}

    async def script(_: Request, connection: Connection) -> None:
        await connection.json(refusal, 400)

    upstream.script = script
    answer = await gateway.chat(**changes)
    assert (answer.status_code, answer.json()) == (400, refusal)
    for name, value in changes.items():
        assert upstream.chats[0].body[name] == value
    assert (await gateway.row())["status"] == "invalid"


async def test_a_body_of_10_mb_works(gateway: Gateway, upstream: Scripted) -> None:
    text = "word " * 2_000_000
    answer = await gateway.chat(messages=[{"role": "user", "content": text}])
    assert answer.status_code == 200
    assert upstream.chats[0].body["messages"][0]["content"] == text


async def test_a_body_over_the_limit_is_refused_by_name(settings: dict[str, Any]) -> None:
    settings["limits"] = {"body_bytes": 100_000}
    async with running_gateway(settings) as gateway:
        answer = await gateway.chat(messages=[{"role": "user", "content": "x" * 300_000}])
        assert answer.status_code == 413
        assert "limit of 100000 bytes" in answer.json()["error"]["message"]
        row = await gateway.row()
        assert (row["status"], row["http_status"]) == ("invalid", 413)


async def test_an_endless_body_is_cut(settings: dict[str, Any]) -> None:
    """Chunked, so no length tells in advance: what is over the limit is not kept, and four times it ends it."""
    settings["limits"] = {"body_bytes": 100_000}
    async with running_gateway(settings) as gateway:
        head = "POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked"
        async with gateway.socket(head) as (_, writer):
            piece = b"%x\r\n%s\r\n" % (50_000, b"x" * 50_000)
            sent = 0
            try:
                for _ in range(2_000):
                    writer.write(piece)
                    await writer.drain()
                    sent += 1
            except ConnectionError:
                pass
            assert sent < 1_000
        assert (await gateway.row())["http_status"] == 413


async def test_a_compressed_body_is_refused(gateway: Gateway) -> None:
    answer = await gateway.http.post("/v1/chat/completions", content=b"x", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


async def test_a_body_cannot_charge_somebody_else(gateway: Gateway) -> None:
    await gateway.chat(user="somebody-else", user_id="x", org_id="y", key_id="z")
    row = await gateway.row()
    assert (row["org_id"], row["user_id"], row["key_id"]) == (
        gateway.people.org,
        gateway.people.user,
        gateway.people.key,
    )
    assert row["tags"] == {"user": "somebody-else"}


async def test_texts_that_postgresql_cannot_hold_are_recorded(gateway: Gateway) -> None:
    await gateway.chat(user="a\u0000b" + "x" * 10_000)
    tag = (await gateway.row())["tags"]["user"]
    assert tag.startswith("a�b") and len(tag) <= 256


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405), ("GET", "/v1/nothing", 404)],
)
async def test_wrong_paths_and_methods(gateway: Gateway, method: str, path: str, status: int) -> None:
    answer = await gateway.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


async def test_a_fault_of_ours_is_a_500_with_a_row(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.routing.rules import RulesRouter

    def fail(*_: object) -> None:
        raise RuntimeError("a defect with a secret in it")

    monkeypatch.setattr(RulesRouter, "route", fail)
    answer = await gateway.send(json.dumps(CHAT | {"model": "auto"}).encode())
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert (await gateway.row())["http_status"] == 500


@pytest.mark.parametrize("coding", ["identity", "Identity"])
async def test_identity_is_no_encoding(gateway: Gateway, coding: str) -> None:
    assert (await gateway.http.post("/v1/chat/completions", json=CHAT, headers={"content-encoding": coding})).is_success


async def test_a_forwarded_address_does_not_pass_the_brake_on_signing_in(gateway: Gateway) -> None:
    statuses = []
    for number in range(10):
        headers = {"x-forwarded-for": f"10.0.0.{number}", "content-type": "application/x-www-form-urlencoded"}
        answer = await gateway.http.post("/dashboard/sign-in", content=b"key=wrong", headers=headers)
        statuses.append(answer.status_code)
    assert 401 in statuses and statuses[-1] == 429


@pytest.mark.parametrize("wish", ["h2c", "websocket"])
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "body later"])
async def test_a_body_beside_a_wish_to_upgrade_is_read(gateway: Gateway, wish: str, apart: bool) -> None:
    """Java's HttpClient asks so; its connection goes on in HTTP/1.1."""
    body = json.dumps(CHAT).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\nconnection: Upgrade, HTTP2-Settings"
    head += f"\r\nupgrade: {wish}\r\nhttp2-settings: AAEAAEAA"
    async with gateway.socket(head, b"" if apart else body) as (reader, writer):
        if apart:
            await asyncio.sleep(0.1)
            writer.write(body)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)).startswith(b"HTTP/1.1 200 ")
        await asyncio.wait_for(reader.readuntil(b'"usage"'), 5)
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b'"ok"}'), 5)
    assert (await gateway.row())["status"] == "ok"
