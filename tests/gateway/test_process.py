"""`python -m gateway` as a process: how it starts, stops, is killed, and what it says when it cannot start."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from tests.gateway.pooled import until
from tests.gateway.running import ADMIN_KEY_HASH, Gateway, make_people
from tests.gateway.scripted import Scripted

TOML = """
[roles]
small = "tiny"
large = "tiny"
[limits]
grace_seconds = 3
[upstreams.engine]
kind = "engine"
base_url = "{url}"
[models.tiny]
upstreams = ["engine"]
price = {{ input_fresh = "10", input_cached = "1", output_text = "20" }}
"""


@dataclass
class Launcher:
    config: Path
    environment: dict[str, str]

    async def start(self, port: int) -> asyncio.subprocess.Process:
        arguments = ["-m", "gateway", "--config", str(self.config), "--port", str(port)]
        return await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env=self.environment, stderr=asyncio.subprocess.PIPE
        )

    @contextlib.asynccontextmanager
    async def running(self, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await self.start(port)
        try:
            await _until_it_listens(process, port)
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def failure(self, port: int) -> str:
        process = await self.start(port)
        _, err = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 1, err
        assert b"Traceback" not in err
        return err.decode()


@pytest.fixture
def launcher(tmp_path: Path, upstream: Scripted, database_url: str) -> Launcher:
    config = tmp_path / "farthing.toml"
    config.write_text(TOML.format(url=upstream.url), encoding="utf-8")
    environment = {
        **os.environ,
        "FARTHING_DATABASE_URL": database_url,
        "FARTHING_ADMIN_KEY_HASH": ADMIN_KEY_HASH,
        "FARTHING_DATA_DIR": str(tmp_path / "data"),
    }
    return Launcher(config, environment)


@pytest.fixture
async def client(database_url: str, port: int) -> AsyncIterator[Gateway]:
    engine = create_async_engine(database_url)
    people = await make_people(engine)
    url = f"http://127.0.0.1:{port}"
    headers = {"authorization": f"Bearer {people.secret}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=20, trust_env=False) as http:
        yield Gateway(url, people, engine, http)
    await engine.dispose()


@pytest.fixture
def port() -> int:
    return free_port()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _until_it_listens(process: asyncio.subprocess.Process, port: int) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if "price book" not in (await http.get(f"http://127.0.0.1:{port}/health/ready")).text:
                    return
            assert process.returncode is None, "it ended while starting"
            await asyncio.sleep(0.05)
    raise AssertionError("it did not start")


async def test_a_row_survives_kill_9(launcher: Launcher, client: Gateway, port: int) -> None:
    async with launcher.running(port) as process:
        blocker = await client.engine.connect()
        await blocker.exec_driver_sql("LOCK TABLE operation IN ACCESS EXCLUSIVE MODE")
        answers = await asyncio.gather(*(client.chat() for _ in range(5)))
        process.send_signal(signal.SIGKILL)
        await process.wait()
    await blocker.close()
    assert [answer.status_code for answer in answers] == [200] * 5
    await client.rows(0)
    async with launcher.running(port):
        rows = await client.rows(5)
    assert {str(row["id"]) for row in rows} == {answer.headers["x-farthing-trace-id"] for answer in answers}


async def test_sigterm_lets_streams_finish(launcher: Launcher, client: Gateway, upstream: Scripted, port: int) -> None:
    upstream.words, upstream.pause = ["a "] * 20, 0.05
    async with launcher.running(port) as process:
        asking = asyncio.create_task(client.chat(stream=True))
        await until(lambda: upstream.chats)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(10):
                while True:
                    with contextlib.suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                        await http.get(f"{client.url}/health/live", headers={"connection": "close"})
        answer = await asking
        assert answer.text.count('"a "') == 20 and answer.text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(process.wait(), 30)
    (row,) = await client._rows()
    assert row["status"] == "ok", "its row was in the database before the process ended"


async def test_a_signal_to_reload_does_not_end_a_gateway_that_starts(launcher: Launcher, port: int) -> None:
    process = await launcher.start(port)
    try:
        await until(lambda: "0" * 15 + "1" in _blocked_signals(process.pid))
        process.send_signal(signal.SIGHUP)
        await _until_it_listens(process, port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _blocked_signals(pid: int) -> str:
    """The mask in hexadecimal, the lowest signal's bit last."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(line for line in status.splitlines() if line.startswith("SigBlk"))


async def test_a_changed_configuration_is_taken_over_while_a_stream_goes_on(
    launcher: Launcher, client: Gateway, upstream: Scripted, port: int
) -> None:
    upstream.words, upstream.pause = ["a "] * 30, 0.05
    async with launcher.running(port) as process:
        asking = asyncio.create_task(client.chat(stream=True))
        await until(lambda: upstream.chats)
        assert (await client.chat(model="other")).status_code == 404
        text = launcher.config.read_text(encoding="utf-8")
        launcher.config.write_text(text + '[models.other]\nupstreams = ["engine"', encoding="utf-8")
        process.send_signal(signal.SIGHUP)
        await asyncio.sleep(0.3)
        assert (await client.chat(model="other")).status_code == 404, "it is not right yet"
        upstream.words, upstream.pause = ["b"], 0.0
        launcher.config.write_text(text + '[models.other]\nupstreams = ["engine"]', encoding="utf-8")
        for _ in range(600):
            answer = await client.chat(model="other")
            if answer.status_code == 200:
                break
            await asyncio.sleep(0.05)
        assert answer.status_code == 200, "the file is looked at without a signal too"
        assert (await asking).text.endswith("data: [DONE]\n\n")


async def test_sigterm_under_load(launcher: Launcher, client: Gateway, upstream: Scripted, port: int) -> None:
    """New requests are refused, those under way are answered in full, and every answer has its row."""
    upstream.words, upstream.pause = ["a "] * 10, 0.03
    answered: list[str] = []
    under_load = asyncio.Event()

    async def ask(stream: bool) -> None:
        with contextlib.suppress(httpx.TransportError):  # refused, or its idle connection was just closed
            while True:
                answer = await client.chat(stream=stream)
                assert answer.status_code == 200 and answer.text.count("a ") == 10
                assert not stream or answer.text.endswith("data: [DONE]\n\n")
                answered.append(answer.headers["x-farthing-trace-id"])
                if len(answered) == 32:
                    under_load.set()

    async with launcher.running(port) as process:
        asking = [asyncio.create_task(ask(number % 2 == 0)) for number in range(16)]
        await asyncio.wait_for(under_load.wait(), 30)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*asking), 30)
        await asyncio.wait_for(process.wait(), 30)
    rows = await client._rows()
    assert {str(row["id"]) for row in rows} == set(answered)
    assert {row["status"] for row in rows} == {"ok"}


async def test_streams_longer_than_the_grace_time_are_cut_and_recorded(
    launcher: Launcher, client: Gateway, upstream: Scripted, port: int
) -> None:
    upstream.words, upstream.pause = ["a "] * 10_000, 0.05
    async with launcher.running(port) as process:
        asking: asyncio.Task[Any] = asyncio.create_task(client.chat(stream=True))
        await until(lambda: upstream.chats)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 30)
        answer = await asking
    assert "The gateway is stopping" in answer.text and answer.text.endswith("data: [DONE]\n\n")
    (row,) = await client._rows()
    assert (row["status"], row["error"]) == ("upstream_error", "the gateway stopped")
    assert row["attempts"][0]["output_text"] > 10


@pytest.mark.parametrize("scheme", ["postgresql://", "postgres://"])
async def test_the_database_as_up_json_and_hosting_companies_write_it(
    launcher: Launcher, client: Gateway, port: int, scheme: str
) -> None:
    launcher.environment["FARTHING_DATABASE_URL"] = launcher.environment["FARTHING_DATABASE_URL"].replace(
        "postgresql+asyncpg://", scheme
    )
    async with launcher.running(port):
        assert (await client.chat()).status_code == 200
        await client.rows(1)


async def test_a_database_that_is_none(launcher: Launcher, port: int) -> None:
    launcher.environment["FARTHING_DATABASE_URL"] = "sqlite:///x"
    assert "needs PostgreSQL" in await launcher.failure(port)


async def test_a_port_in_use(launcher: Launcher, port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        said = await launcher.failure(port)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said
    assert "--port" in said


async def test_a_wrong_configuration(launcher: Launcher, port: int) -> None:
    launcher.config.write_text(launcher.config.read_text(encoding="utf-8").replace('"tiny"', '"huge"'))
    assert "'huge' is not among [models]: tiny" in await launcher.failure(port)


async def test_a_data_folder_that_cannot_be_written(launcher: Launcher, port: int) -> None:
    launcher.environment["FARTHING_DATA_DIR"] = "/proc/nowhere"
    assert "the spool /proc/nowhere/spool cannot be used" in await launcher.failure(port)


async def test_two_on_one_data_folder(launcher: Launcher, port: int) -> None:
    async with launcher.running(port):
        assert "another process uses the spool" in await launcher.failure(0)
