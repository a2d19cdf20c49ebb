"""Generated programs run where they can do no harm, or not at all."""

import socket

import pytest

from benchmarks import sandbox
from benchmarks.sandbox import IsolationError, Verdict


def verdict(program: str, seconds: int = 10) -> Verdict:
    try:
        return sandbox.run(program, seconds)
    except IsolationError as error:
        pytest.skip(str(error))


def test_a_program_that_runs_to_its_end_passes() -> None:
    assert verdict("import math, re, heapq\nassert math.isqrt(10) == 3") is Verdict.PASSED


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 == 2",
        "this is no Python",
        "exit(0)",
        "import os; os._exit(0)",
        "import os; os.fork()",
        "open('file', 'w').write('x')",
        "x = bytearray(1 << 30)",
    ],
)
def test_what_is_wrong_or_forbidden_fails(program: str) -> None:
    assert verdict(program) is Verdict.FAILED


def test_a_program_reaches_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = f"import socket; socket.create_connection({listener.getsockname()})"
        assert verdict(program) is Verdict.FAILED
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
        socket.create_connection(listener.getsockname()).close()


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_a_program_without_end_is_stopped(program: str) -> None:
    assert verdict(program, seconds=1) is Verdict.TIMED_OUT


def test_where_the_network_cannot_be_taken_away_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "RAN_TO_ITS_END", 0)
    monkeypatch.setattr(sandbox, "NOT_ISOLATED", 1)  # what an exception leaves
    with pytest.raises(IsolationError, match="not run"):
        sandbox.run("assert False")
