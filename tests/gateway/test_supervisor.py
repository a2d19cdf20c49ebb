"""Real child processes: started, restarted, stopped in order, and gone when the supervisor is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.processes import PythonChild
from gateway.supervisor import PartDiedError, StopRequested, Supervisor, ending, restart_delay

# A child is `python -P -m runpy_child …` in production; here the module is one that the test writes.
STEADY = "import time\nprint('steady', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PythonChild]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(name: str, source: str, patience: float = 5.0) -> PythonChild:
        (tmp_path / f"{name}_module.py").write_text(source)
        log = tmp_path / f"{name}.log"
        log.touch()
        return PythonChild(name, log, [f"{name}_module"], {"FROM_TEST": name}, patience)

    return make


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_has_its_environment_and_log_and_stops_when_asked(child: Callable[..., PythonChild]) -> None:
    part = child("a", "import os, time\nprint(os.environ['FROM_TEST'], flush=True)\ntime.sleep(600)\n")
    part.start()
    wait_for(lambda: part.last_lines() == "a")
    assert part.exit_code() is None
    part.stop()
    assert part.exit_code() == -signal.SIGTERM


def test_a_child_that_will_not_stop_is_killed(child: Callable[..., PythonChild]) -> None:
    stubborn = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)\n"
    part = child("a", stubborn, 0.3)
    part.start()
    wait_for(lambda: part.last_lines() == "deaf")
    part.stop()
    assert part.exit_code() == -signal.SIGKILL
    part = child("b", stubborn, 600)
    part.start()
    wait_for(lambda: part.last_lines() == "deaf")
    part.stop(hurry=lambda: True)
    assert part.exit_code() == -signal.SIGKILL


def test_one_that_dies_while_starting_is_shown_with_its_log(child: Callable[..., PythonChild]) -> None:
    supervisor = Supervisor(print)
    with supervisor.running():
        steady = child("a", STEADY)
        supervisor.start(steady)
        supervisor.start(child("b", "print('no such model')\nraise SystemExit(3)\n"))
        with pytest.raises(PartDiedError, match=r"b stopped while starting \(exit code 3\)(.|\n)*no such model"):
            supervisor.wait_until(lambda: False)
    assert steady.exit_code() is not None


def test_what_dies_is_restarted_and_a_signal_stops_all_in_reverse_order(
    child: Callable[..., PythonChild], tmp_path: Path
) -> None:
    order, watched = tmp_path / "order", tmp_path / "watched"
    source = (
        "import os, signal, sys, time\n"
        f"def stop(*_):\n    open({str(order)!r}, 'a').write(os.environ['FROM_TEST'])\n    sys.exit()\n"
        "signal.signal(15, stop)\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"
    )
    said: list[str] = []
    first, second = child("a", source), child("b", source)
    supervisor = Supervisor(said.append)

    def pids(part: PythonChild) -> list[int]:
        return [int(line) for line in part.log.read_text().split()]

    killer = subprocess.Popen(  # watch() keeps this thread, so somebody else must act
        [
            sys.executable,
            "-c",
            "import os, sys, time, pathlib\n"
            "log, watched, parent = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])\n"
            "count = lambda path: len(path.read_text().split()) if path.exists() else 0\n"
            "wait = lambda path, n: [time.sleep(.02) for _ in iter(lambda: count(path) < n, False)]\n"
            "wait(watched, 1)\n"  # before that a death ends the start
            "os.kill(int(log.read_text().split()[0]), 9)\n"
            "wait(log, 2); time.sleep(.3); os.kill(parent, 15)\n",
            str(first.log),
            str(watched),
            str(os.getpid()),
        ]
    )
    with pytest.raises(StopRequested), supervisor.running():
        supervisor.start(first)
        supervisor.start(second)
        supervisor.wait_until(lambda: bool(pids(first) and pids(second)))
        watched.write_text("yes")
        supervisor.watch()
    assert killer.wait(10) == 0
    assert len(pids(first)) == 2 and len(pids(second)) == 1
    assert order.read_text() == "ba"
    assert said[0].startswith("a stopped (killed by SIGKILL); starting it again")
    assert [line.partition(":")[0] for line in said[1:]] == ["stopping"]
    assert not any(alive(pid) for pid in (*pids(first), *pids(second)))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("stop_signal", [signal.SIGKILL, signal.SIGTERM])
def test_no_child_outlives_the_supervisor(tmp_path: Path, stop_signal: signal.Signals) -> None:
    """The whole tree, PostgreSQL included, in a process of its own that is then killed."""
    program = tmp_path / "program.py"
    (tmp_path / "steady_module.py").write_text(STEADY)
    program.write_text(
        f"""
from pathlib import Path
from gateway.postgres import EmbeddedPostgres
from gateway.processes import PythonChild
from gateway.supervisor import StopRequested, Supervisor
here = Path({str(tmp_path)!r})
supervisor = Supervisor(print)
try:
    with supervisor.running():
        supervisor.start(EmbeddedPostgres(here / "data", log=here / "postgres.log"))
        supervisor.start(PythonChild("steady", here / "steady.log", ["steady_module"], {{}}, 5))
        supervisor.wait_until(lambda: "steady" in (here / "steady.log").read_text())
        (here / "ready").touch()
        supervisor.watch()
except StopRequested:
    pass
"""
    )
    process = subprocess.Popen([sys.executable, program], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    wait_for((tmp_path / "ready").exists, 60)
    children = descendants(process.pid)
    assert len(children) > 3  # PostgreSQL has helpers of its own
    process.send_signal(stop_signal)
    assert process.wait(30) == (0 if stop_signal == signal.SIGTERM else -stop_signal)
    wait_for(lambda: not any(alive(pid) for pid in children), 30)
    assert "database system is shut down" in (tmp_path / "postgres.log").read_text()


def descendants(pid: int) -> list[int]:
    """Pids of all processes below `pid`, by walking /proc."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found = [pid]
    for above in found:
        found += [child for child, parent in parents.items() if parent == above]
    return found[1:]


def test_delays_grow_to_a_limit() -> None:
    assert [restart_delay(n) for n in (0, 1, 2, 3, 4, 20)] == [0, 0.5, 1, 2, 4, 30]


def test_exit_codes_in_words() -> None:
    assert [ending(code) for code in (0, 3, -9, -200)] == [
        "exit code 0",
        "exit code 3",
        "killed by SIGKILL",
        "killed by signal 200",
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_comes_while_an_object_is_finalised_is_not_lost() -> None:
    class Finalised:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    supervisor = Supervisor(lambda line: None)
    with pytest.raises(StopRequested), supervisor.running():
        Finalised()
        supervisor.wait_until(lambda: False)
