# ruff: noqa: F811 - fixtures come from another module
"""kill -9 of the gateway, of PostgreSQL and of both, in the middle of streams and batches: one row for every answer."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from gateway.postgres import EmbeddedPostgres
from migrations import upgrade
from tests.gateway.pooled import until
from tests.gateway.running import Gateway, make_people
from tests.gateway.scripted import Connection, Request, Scripted, frame
from tests.gateway.test_process import Launcher, client, launcher, port  # noqa: F401 - fixtures


async def two_words_and_silence(_: Request, connection: Connection) -> None:
    await connection.start()
    for n, word in enumerate(("Hello ", "world, how are you?")):
        await connection.frame(frame({"content": word}, n + 1))
    await connection.left()


async def test_a_stream_of_a_killed_gateway_has_its_row(
    launcher: Launcher,
    client: Gateway,
    upstream: Scripted,
    port: int,
) -> None:
    upstream.script = two_words_and_silence
    ids = []
    async with launcher.running(port) as process:
        request = {"model": "tiny", "messages": [{"role": "user", "content": "hi " * 50}], "stream": True}
        async with client.http.stream("POST", "/v1/chat/completions", json=request) as answer:
            ids.append(answer.headers["x-farthing-trace-id"])
            seen = ""
            async for piece in answer.aiter_text():
                seen += piece
                if "how are you" in seen:
                    break
            process.send_signal(signal.SIGKILL)
            await process.wait()
    await client.rows(0)
    async with launcher.running(port):
        (row,) = await client.rows(1)
    assert str(row["id"]) == ids[0]
    assert (row["status"], row["billed"], row["stream"]) == ("upstream_error", Decimal(0), True)
    assert "killed" in row["error"]
    (one,) = row["attempts"]
    assert one["usage_source"] == "estimated" and not one["billable"]
    assert (one["input_fresh"], one["output_text"]) == (len("hi " * 50) // 4, -(-len("Hello world, how are you?") // 4))


@contextlib.asynccontextmanager
async def killable_postgres(
    launcher: Launcher, port: int, folder: Path
) -> AsyncIterator[tuple[EmbeddedPostgres, Gateway]]:
    """A server that no other test needs, for the gateways of `launcher`; and what calls them and reads their rows."""
    server = EmbeddedPostgres(folder, {"max_connections": "100"})
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, server.stop)
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(upgrade, server.url)
        launcher.environment["FARTHING_DATABASE_URL"] = server.url
        engine = create_async_engine(server.url, pool_pre_ping=True)
        stack.push_async_callback(engine.dispose)
        people = await make_people(engine)
        url, headers = f"http://127.0.0.1:{port}", {"authorization": f"Bearer {people.secret}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=20, trust_env=False) as http:
            yield server, Gateway(url, people, engine, http)


def kill(server: EmbeddedPostgres) -> None:
    process = server._process
    assert process is not None
    process.kill()
    process.wait()


@pytest.mark.parametrize("victims", ["gateway", "postgres", "both"])
async def test_a_batch_that_was_half_copied_is_copied_once(
    launcher: Launcher, port: int, postgres_folder: Path, victims: str
) -> None:
    """They are killed in the gateway's transaction, between the operations' COPY and that of their attempts."""
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'attempt'::regclass")
    async with contextlib.AsyncExitStack() as stack:
        server, client = await stack.enter_async_context(
            killable_postgres(launcher, port, postgres_folder / f"half-copied-{victims}")
        )
        process = await stack.enter_async_context(launcher.running(port))
        answered = {(await client.chat()).headers["x-farthing-trace-id"]}
        await client.rows(1)
        async with client.engine.connect() as blocking, client.engine.connect() as looking:
            await blocking.execute(text("LOCK TABLE attempt IN ACCESS EXCLUSIVE MODE"))
            answered |= {(await client.chat()).headers["x-farthing-trace-id"] for _ in range(3)}
            async with asyncio.timeout(30):
                while not (await looking.execute(waiting)).scalar_one():  # noqa: ASYNC110 - it happens in the database
                    await asyncio.sleep(0.02)
            if victims != "postgres":
                process.send_signal(signal.SIGKILL)
                await process.wait()
            assert (await looking.execute(text("SELECT count(*) FROM operation"))).scalar_one() == 1, "not committed"
            if victims != "gateway":
                await asyncio.to_thread(kill, server)
                for connection in (blocking, looking):
                    await connection.invalidate()
                await asyncio.to_thread(server.start)
            else:
                await blocking.rollback()
        if victims != "postgres":
            await stack.enter_async_context(launcher.running(port))
        rows = await client.rows(4)
    assert {str(row["id"]) for row in rows} == answered
    assert [len(row["attempts"]) for row in rows] == [1] * 4


async def test_every_answer_has_one_row_whoever_is_killed(
    launcher: Launcher,
    upstream: Scripted,
    port: int,
    postgres_folder: Path,
) -> None:
    """Gateway and PostgreSQL are killed in turn and together while calls go on; what callers saw is in the ledger."""
    answered: set[str] = set()
    upstream.pause = 0.01

    async def call(http: httpx.AsyncClient, number: int) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": number % 2 == 0}
        while True:
            try:
                async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    if answer.status_code == 200:
                        async for piece in answer.aiter_bytes():
                            if piece:
                                answered.add(answer.headers["x-farthing-trace-id"])
                    else:
                        await asyncio.sleep(0.05)
            except httpx.TransportError:
                await asyncio.sleep(0.05)

    async with killable_postgres(launcher, port, postgres_folder / "killed") as (server, client):
        callers = [asyncio.create_task(call(client.http, n)) for n in range(8)]
        for victims in ("gateway", "postgres", "both", "both"):
            async with launcher.running(port) as process:
                before = len(answered)
                await until(lambda: len(answered) > before + 20)  # noqa: B023 - awaited here
                if victims != "gateway":
                    await asyncio.to_thread(kill, server)
                if victims == "postgres":
                    await asyncio.sleep(0.5)
                process.send_signal(signal.SIGKILL)
                await process.wait()
            if victims != "gateway":
                await asyncio.to_thread(server.start)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        assert len(answered) > 50
        async with launcher.running(port):
            deadline = asyncio.get_running_loop().time() + 60
            rows: list[dict[str, Any]] = []
            while asyncio.get_running_loop().time() < deadline and not answered <= {str(row["id"]) for row in rows}:
                await asyncio.sleep(0.1)
                rows = await client._rows()
    assert answered <= {str(row["id"]) for row in rows}
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["attempts"] for row in rows if str(row["id"]) in answered)
