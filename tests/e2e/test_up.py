"""`farthing up` as a process: what it refuses, what it keeps, what it leaves behind (nothing)."""

import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
from stack import Stack, free_port, wait_for

from gateway.postgres import EmbeddedPostgres

pytestmark = pytest.mark.e2e


def refused(stack: Stack, *sentences: str, seconds: float = 30) -> None:
    """It ended soon, with exit code 1 and a sentence, and left nothing."""
    began = time.monotonic()
    try:
        code = stack.process.wait(seconds)
    finally:
        stack.stop()
    assert code == 1, f"{time.monotonic() - began:.1f} s: {stack.progress}"
    assert stack.printed == ""
    assert "Traceback" not in stack.progress
    for sentence in sentences:
        assert sentence in stack.progress


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(Stack(tmp_path / "data", "--demo", port=port), f"port {port} cannot be used", "--port")


def test_a_data_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # below a file not even root can make a folder
    refused(Stack(tmp_path / "file" / "data"), f"cannot write to the data folder {tmp_path / 'file' / 'data'}")


def test_an_unknown_model(tmp_path: Path) -> None:
    refused(Stack(tmp_path / "data", "--small", "no-such-model"), "no-such-model", "farthing models list")


def test_a_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "farthing.toml").write_text("[roles\n")
    refused(Stack(tmp_path / "data", "--no-engine"), "farthing.toml is not valid TOML")


def test_a_part_that_dies_while_starting_is_shown_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "farthing.toml").write_text(
        '[roles]\nsmall = "a"\nlarge = "a"\n[models.a]\nupstreams = ["none"]\n'
    )
    refused(Stack(tmp_path / "data", "--no-engine"), "gateway stopped while starting", "logs/gateway.log", "upstream")


def test_a_later_run_keeps_the_keys(tmp_path: Path) -> None:
    data_dir, port = tmp_path / "data", free_port()

    def run_once() -> tuple[str, str, int]:
        stack = Stack(data_dir, "--no-engine", port=port)
        try:
            state = stack.wait_until_up().file
            reply = httpx.get(f"{state.base_url}/models", headers={"authorization": f"Bearer {state.api_key}"})
        finally:
            assert stack.stop() == 0
        return state.api_key, state.admin_key, reply.status_code

    first = run_once()
    (data_dir / "farthing.toml").write_text((data_dir / "farthing.toml").read_text() + "# mine\n")
    assert run_once() == first
    assert first[2] == 200
    assert (data_dir / "farthing.toml").read_text().endswith("# mine\n")
    (data_dir / "up.json").unlink()  # only hashes are stored: a lost key is replaced
    again = run_once()
    assert again[0] != first[0] and again[1] != first[1] and again[2] == 200


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_starting_leaves_nothing(tmp_path: Path, stop_signal: signal.Signals) -> None:
    stack = Stack(tmp_path / "data", "--no-engine")
    wait_for(lambda: "PostgreSQL" in stack.progress)
    time.sleep(0.5)
    assert stack.stop(stop_signal) == 0
    assert "Traceback" not in stack.progress
    assert "Ctrl-C stops everything" not in stack.printed


def test_when_the_supervisor_is_killed_its_children_go_too(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "data", "--no-engine").wait_until_up()
    below = stack.descendants()
    assert any("-m gateway" in line for line in below.values())
    os.kill(stack.process.pid, signal.SIGKILL)
    stack.process.wait(10)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 60)
    second = Stack(tmp_path / "data", "--no-engine").wait_until_up()  # and the folder is usable at once
    assert second.stop() == 0


def test_an_outside_postgresql_that_goes_away_and_returns(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "pg")
    server.start()
    stack = Stack(tmp_path / "data", "--no-engine", "--database-url", server.url.replace("+asyncpg", ""))
    try:
        state = stack.wait_until_up().file
        assert not (tmp_path / "data" / "postgres").exists()
        body = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
        headers = {"authorization": f"Bearer {state.api_key}"}
        with httpx.Client(base_url=state.base_url, headers=headers, timeout=60) as client:
            assert client.get("models").status_code == 200
            server.stop()
            reply = client.post("chat/completions", json=body)
            assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
            assert reply.json()["error"]["message"]
            server.start()
            wait_for(lambda: client.get("models").status_code == 200)
    finally:
        stack.stop()
        server.stop()
