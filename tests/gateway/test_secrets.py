"""Keys, prompts and answers stay on the way: they are in no log, database, spool, trace, metric or error text."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.people import NewSecret, create_key, restrict_key, rotate_key
from billing.restrictions import Restrictions
from gateway.pipeline import Pipeline
from gateway.telemetry import configure_logs
from tests.gateway.collector import collector
from tests.gateway.pooled import until
from tests.gateway.running import CHAT, Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Scripted
from tests.gateway.wire import Wire

PROMPT, SYSTEM, ARGUMENT, ANSWER = "prompt-" + "7f3a", "system-" + "91bc", "argument-" + "c04d", "answer-" + "5e2f"
WRONG, PROVIDER = "fk-wrong-" + "a81e", "sk-provider-" + "44d9"

CONVERSATION = [
    {"role": "system", "content": f"Be {SYSTEM}."},
    {"role": "user", "content": [{"type": "text", "text": f"Say {PROMPT}."}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": f'{{"x": "{ARGUMENT}"}}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": f"It is {ARGUMENT}."},
]


async def dump(engine: AsyncEngine) -> str:
    """Every row of every table."""
    async with engine.connect() as connection:
        query = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        tables = (await connection.execute(text(query))).scalars().all()
        rows = [
            (await connection.execute(text(f'SELECT t::text FROM "{table}" t'))).scalars().all() for table in tables
        ]
    return "\n".join(row for found in rows for row in found)


def files(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


async def echo(request: Request, connection: Connection) -> None:
    """Refuse, and quote what was sent, as some upstreams do."""
    said = json.dumps(request.body["messages"])
    quoted = f"cannot read {said} of {request.headers.get('authorization')}"
    await connection.json({"error": {"message": quoted, "type": "invalid_request_error", "code": "bad_turn"}}, 400)


async def break_down(request: Request, connection: Connection) -> None:
    """Fail in mid-stream, and quote both sides."""
    await connection.start()
    await connection.frame({"choices": [{"index": 0, "delta": {"content": ANSWER}}]})
    await connection.frame({"error": {"message": f"lost after {ANSWER} to {json.dumps(request.body['messages'])}"}})
    await connection.done()


async def live_through_everything(gateway: Gateway, upstream: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers whole and streamed, refusals of every kind, upstreams that fail, a failure of the gateway's own."""
    said = {"messages": CONVERSATION, "max_tokens": 5}
    for model in ("tiny", "hosted"):
        assert (await gateway.chat(model=model, **said)).status_code == 200
        assert ANSWER in (await gateway.chat(model=model, stream=True, **said)).text
        for script in (echo, break_down) if model == "hosted" else ():  # our engine's own words quote nobody
            upstream.script = script
            await gateway.chat(model=model, stream=True, **said)
        upstream.script = None
    for body in (
        b'{"messages": [{"role": "user", "content": "%s"' % PROMPT.encode(),
        b'{"model": "tiny", "messages": "%s"}' % PROMPT.encode(),
        b'{"model": "tiny", "messages": [{"role": "user", "content": "%s"}], "max_tokens": "%s"}'
        % (PROMPT.encode(), PROMPT.encode()),
        b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "api_key": "%s"}' % PROVIDER.encode(),
        b"\xff" + PROMPT.encode(),
    ):
        assert (await gateway.send(body)).status_code == 400
    for headers in (
        {"authorization": f"Bearer {WRONG}"},
        {"x-api-key": WRONG},
        {"authorization": f"Basic {WRONG}"},
        {"x-farthing-tags": PROMPT},
    ):
        answer = await gateway.http.post("/v1/chat/completions", json=CHAT | said, headers=headers)
        assert answer.status_code in (401, 403) and WRONG not in answer.text

    def fail(_self: Pipeline, _operation: object, call: Any) -> str:
        raise RuntimeError(f"cannot route {call.requested_model}")

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "_route", fail)
        assert (await gateway.chat(**said)).status_code == 500
    async with gateway.raw_chat(stream=True, **said) as (reader, _):
        await reader.readuntil(b"data: ")
    await upstream.stop()
    assert (await gateway.chat(**said)).status_code in (502, 503)
    await upstream.start()


@contextlib.contextmanager
def logs() -> Iterator[None]:
    """Logs as `farthing gateway` writes them. No fixture: what is captured is another file while a test is set up."""
    before, handlers = structlog.get_config(), logging.getLogger().handlers[:]
    configure_logs()
    yield
    structlog.configure(**before)
    logging.getLogger().handlers[:] = handlers


async def test_keys_prompts_and_answers_stay_on_the_way(
    settings: dict[str, Any],
    tmp_path: Path,
    upstream: Scripted,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    upstream.words = ["The ", ANSWER, "."]
    monkeypatch.setenv("PROVIDER_KEY", PROVIDER)
    settings["upstreams"]["hosted"]["api_key_env"] = "PROVIDER_KEY"
    folder = tmp_path / "wire"
    folder.mkdir()
    wire = Wire(str(folder), settings["database_url"])
    await wire.mend()
    async with collector() as (port, traces):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        started = running_gateway(settings | {"database_url": wire.url}, people_url=settings["database_url"])
        with logs():
            async with started as gateway:
                newer = await more_keys(gateway)
                await live_through_everything(gateway, upstream, monkeypatch)
                upstream.pause = 0.2
                before = len(upstream.chats)
                streaming = asyncio.create_task(gateway.chat(stream=True, messages=CONVERSATION))
                await until(lambda: len(upstream.chats) > before)
                await wire.cut()
                spooled = await streaming
                assert spooled.text.endswith("data: [DONE]\n\n")
                spool = files(Path(settings["data_dir"]))
                metrics = (await gateway.http.get("/metrics")).text
                await wire.mend()
                last = spooled.headers["x-farthing-trace-id"]
                rows = await settled(gateway, last)
                database = await dump(gateway.engine)
                secrets = [gateway.people.secret, *(key.secret for key in newer)]
    await wire.cut()
    logged = "".join(capfd.readouterr())
    sent = b"".join(str(request.headers).encode() + request.raw for request in upstream.requests)

    places = {
        "logs": (logged, "request failed"),
        "database": (database, str(rows[0]["id"])),
        "spool": (spool.decode(errors="replace"), last),
        "traces": (b"".join(traces).decode(errors="replace"), "farthing.operation_id"),
        "metrics": (metrics, "farthing_operations"),
    }
    for place, (content, mark) in places.items():
        assert mark in content, f"what was looked at is not the {place}"
        for secret in [*secrets, WRONG, PROVIDER, PROMPT, SYSTEM, ARGUMENT, ANSWER]:
            assert secret not in content, f"{secret} is in the {place}"
    assert PROMPT.encode() in sent and PROVIDER.encode() in sent
    for secret in secrets:
        assert secret.encode() not in sent, "a key of ours went upstream"
    engine = [request for request in upstream.requests if request.headers.get("x-farthing-request-id")]
    assert engine and not any(PROVIDER in str(request.headers) for request in engine)


async def more_keys(gateway: Gateway) -> list[NewSecret]:
    """What else the key table may hold: a second key, a rotated secret, restrictions."""
    async with gateway.engine.begin() as connection:
        second = await create_key(connection, gateway.people.org, "second")
        rotated = await rotate_key(connection, gateway.people.key, timedelta(days=1))
        await restrict_key(connection, gateway.people.key, Restrictions(tags={"scenario": "chat"}))
    assert rotated is not None
    return [second, rotated]


async def settled(gateway: Gateway, last: str) -> list[dict[str, Any]]:
    """The ledger's rows, once the operation `last` is among them and no more come."""
    rows: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while last not in {str(row["id"]) for row in rows} or len(found := await gateway._rows()) > len(rows):
            await asyncio.sleep(1.0)
            rows = await gateway._rows()
    return found
