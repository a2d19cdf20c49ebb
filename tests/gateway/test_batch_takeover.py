"""A process is killed, or the database away, in the middle of a batch: it is finished, and nothing is charged twice."""

import asyncio
import os
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from sqlalchemy.ext.asyncio import create_async_engine

from tests.gateway.batching import eventually, request, results, start, until
from tests.gateway.running import ADMIN_KEY_HASH, Gateway, make_people
from tests.gateway.scripted import Connection, Request, Scripted
from tests.gateway.test_database_away import cuttable
from tests.gateway.test_process import TOML, Launcher

LINES, AT_ONCE, ANSWERED = 30, 8, 10


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launcher(folder: Path, upstream: Scripted, database_url: str) -> Launcher:
    folder.mkdir()
    config = folder / "farthing.toml"
    config.write_text(TOML.format(url=upstream.url), encoding="utf-8")
    places = {"FARTHING_DATABASE_URL": database_url, "FARTHING_DATA_DIR": str(folder / "data")}
    return Launcher(config, {**os.environ, **places, "FARTHING_ADMIN_KEY_HASH": ADMIN_KEY_HASH})


async def test_kill_9_in_the_middle_of_a_batch(tmp_path: Path, upstream: Scripted, database_url: str) -> None:
    seen: Counter[str] = Counter()
    killed = asyncio.Event()

    async def script(request: Request, connection: Connection) -> None:
        seen[request.body["messages"][0]["content"]] += 1
        if sum(seen.values()) > ANSWERED:
            await killed.wait()
        await upstream.chat(request, connection)

    upstream.script = script
    engine = create_async_engine(database_url)
    people = await make_people(engine)
    ports = free_port(), free_port()
    first, second = (
        AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=people.secret, max_retries=0) for port in ports
    )
    async with launcher(tmp_path / "first", upstream, database_url).running(ports[0]) as process:
        made = await start(first, [request(str(n), f"line {n}") for n in range(LINES)])
        await eventually(lambda: sum(seen.values()) == ANSWERED + AT_ONCE)

        async def ten_are_done() -> bool:
            counts = (await first.batches.retrieve(made.id)).request_counts
            return counts is not None and counts.completed == ANSWERED

        await eventually(ten_are_done)
        ledger = Gateway("", people, engine, None)  # type: ignore[arg-type]
        await ledger.rows(ANSWERED)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    killed.set()
    async with launcher(tmp_path / "second", upstream, database_url).running(ports[1]):
        ended = await until(second, made)
        assert ended.status == "completed"
        assert ended.request_counts is not None and ended.request_counts.completed == LINES
        assert len(await results(second, ended.output_file_id)) == LINES
        rows = await ledger.rows(LINES)
    assert Counter(seen.values()) == {1: LINES - AT_ONCE, 2: AT_ONCE}, "only what was under way ran again"
    assert {row["status"] for row in rows} == {"ok"} and {row["tags"]["batch"] for row in rows} == {made.id}
    await engine.dispose()


async def test_the_database_away_in_the_middle_of_a_batch(
    settings: dict[str, Any], tmp_path: Path, upstream: Scripted
) -> None:
    """The answers that came meanwhile are written when it is back; none is asked for again."""
    seen: Counter[str] = Counter()
    away = asyncio.Event()

    async def script(request: Request, connection: Connection) -> None:
        seen[request.body["messages"][0]["content"]] += 1
        await away.wait()
        await upstream.chat(request, connection)

    upstream.script = script
    async with cuttable(settings, tmp_path) as (gateway, wire):
        made = await start(gateway.sdk, [request(str(n), f"line {n}") for n in range(LINES)])
        await eventually(lambda: len(seen) == AT_ONCE)
        await wire.cut()
        away.set()
        await asyncio.sleep(4)
        assert len(seen) == AT_ONCE, "no other line can be taken"
        await wire.mend()
        ended = await until(gateway.sdk, made)
        assert ended.request_counts is not None and ended.request_counts.completed == LINES
        assert set(seen.values()) == {1} and len(seen) == LINES
        assert {row["status"] for row in await gateway.rows(LINES)} == {"ok"}
