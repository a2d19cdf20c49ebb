"""A server under measurement: a process tree on a loopback port, how long it took to be ready, what memory it took."""

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

START_SECONDS = 600.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class System:
    """How to start one system. `command` has {port} where the port goes."""

    name: str
    family: str
    command: Sequence[str]
    model: str
    """What requests call the model."""
    env: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"
    """The path that answers 200 once it is ready."""
    slow_start: bool = False
    """Started once and measured in one go, instead of once a repetition."""
    weight_bits: int = 16


@dataclass(frozen=True)
class Running:
    url: str
    pid: int
    ready: float
    """Seconds from the start of the process to its first 200 on its health path."""

    def peak_memory(self) -> int:
        """Bytes: the sum over the process tree of each one's largest resident size so far."""
        return sum(_field(pid, "status", "VmHWM") for pid in tree(self.pid))

    def shared_out_memory(self) -> int:
        """Bytes resident now, a page that several processes map counted once (PSS)."""
        return sum(_field(pid, "smaps_rollup", "Pss") for pid in tree(self.pid))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def start(system: System) -> Iterator[Running]:
    """Run `system` until the block ends, which a SIGTERM to this process does too. Raises RuntimeError with the end of
    its log when it does not get ready."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        child = subprocess.Popen(
            [part.replace("{port}", str(port)) for part in system.command],
            env={**os.environ, **system.env},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while not _healthy(port, system.health):
                if child.poll() is not None or time.perf_counter() - began > START_SECONDS:
                    log.seek(0)
                    tail = log.read().decode(errors="replace")[-2000:]
                    raise RuntimeError(f"{system.name} did not start:\n{tail}")
                time.sleep(0.05)
            yield Running(url, child.pid, time.perf_counter() - began)
        finally:
            _stop(child)
            signal.signal(signal.SIGTERM, before)


def _healthy(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(child: "subprocess.Popen[bytes]") -> None:
    """End the child and what it started; what ignores SIGTERM for 20 seconds is killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def tree(root: int) -> list[int]:
    """`root` and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        found.append(pid := waiting.pop())
        waiting += children.get(pid, [])
    return found


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on, which follows the name in brackets; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_seconds(root: int) -> float:
    """CPU time that `root` and everything below it have used so far, in the kernel too."""
    return sum(sum(map(int, stat[11:15])) for pid in tree(root) if (stat := _stat(pid))) / TICKS


def _field(pid: int, file: str, name: str) -> int:
    try:
        text = Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


class Foreign:
    """Cores that processes other than the measured ones kept busy while this was open: what makes a figure noisy."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began, self._machine, self._own = time.perf_counter(), _busy(), self._ours()

    def cores(self) -> float:
        seconds = time.perf_counter() - self._began
        return max(0.0, (_busy() - self._machine - self._ours() + self._own) / seconds)

    def _ours(self) -> float:
        return cpu_seconds(self._pid) + sum(os.times()[:2])


def _busy() -> float:
    """Seconds of CPU time that all processes together have used since boot."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / TICKS
