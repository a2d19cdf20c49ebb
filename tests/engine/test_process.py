"""`python -m engine serve` as a process: what it says when it can't start, and how it ends."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest


@contextmanager
def start(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a process, which does not outlive the test."""
    with subprocess.Popen(
        [sys.executable, "-m", "engine", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def refusal(*arguments: str) -> str:
    """What a start that must fail says; asserts that it is a sentence and not a traceback."""
    with start(*arguments) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode != 0 and "Traceback" not in errors
    return re.sub(r"[\s│]+", " ", errors)


@pytest.mark.e2e
def test_a_start_that_cannot_work_says_why(tmp_path: Path) -> None:
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUF" + bytes(100))
    assert "nothing-here" in refusal("serve", "nothing-here")
    assert "junk.gguf" in refusal("serve", str(junk), "--port", "0")
    assert "'lots' is not a size" in refusal("serve", str(junk), "--kv-memory", "lots")
    assert "Two of the models would be called 'junk'" in refusal("serve", str(junk), str(junk))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"Cannot listen on 127.0.0.1:{port}" in refusal("serve", str(junk), "--port", port)


@pytest.mark.e2e
@pytest.mark.model
def test_a_signal_while_loading_ends_it_at_once(small_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with start("serve", str(small_model), "--port", str(port)) as process:
        health = wait_for(lambda: httpx.get(f"http://127.0.0.1:{port}/health"))
        assert health.status_code in (503, 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


@pytest.mark.e2e
@pytest.mark.model
def test_it_says_what_it_decided_and_a_signal_lets_streams_end(small_model: Path) -> None:
    options = ("--port", "0", "--kv-memory", "64MiB", "--max-batch-tokens", "128")
    with start("serve", str(small_model), *options) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6)]
        url = re.search(r"http://\S+", lines[0])[0]
        assert small_model.stem in lines[1] and "weights" in lines[1]
        assert "182 of 16 tokens = 2,912 tokens of KV cache in bfloat16, 64.0 MiB" in lines[2]
        assert re.search(r"cost .* a step, .* a prefill token and .* a decode token", lines[3])
        assert re.search(r"memory .* now; .* sampling at most [1-9][\d.]* [MG]iB", lines[4])
        assert "a step computes up to 128 tokens of 128 requests" in lines[5]
        body = {
            "model": small_model.stem, "prompt": "On and on", "max_tokens": 2800, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as response:
            events = response.iter_lines()
            next(events)
            process.send_signal(signal.SIGINT)
            rest = [line[6:] for line in events if line]
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-3])["choices"][0]["finish_reason"] == "abort"
        assert json.loads(rest[-2])["farthing"]["output_text"] > 1
        assert process.wait(timeout=20) == 0


def wait_for(ask, seconds: float = 60):
    """The first answer that is not a connection error."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
