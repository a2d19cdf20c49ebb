"""`farthing up` as a person runs it, in a data folder and on a port of its own."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gateway.upfile import UpFile

FARTHING = Path(sys.executable).with_name("farthing")
START_SECONDS = 900  # the first run of all fetches half a gigabyte


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Stack:
    """One running `farthing up`."""

    def __init__(self, data_dir: Path, *arguments: str, port: int | None = None) -> None:
        self.data_dir = data_dir
        self.port = port or free_port()
        self._outputs = tempfile.TemporaryDirectory()
        self._out, self._err = Path(self._outputs.name) / "out", Path(self._outputs.name) / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [FARTHING, "up", *arguments, "--data-dir", data_dir, "--port", str(self.port)],
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait_until_up(self) -> "Stack":
        """Return once the banner is complete."""
        deadline = time.monotonic() + START_SECONDS
        while "Ctrl-C stops everything." not in self.printed:
            assert self.process.poll() is None and time.monotonic() < deadline, self.progress
            time.sleep(0.1)
        return self

    @property
    def printed(self) -> str:
        return self._out.read_text()

    @property
    def progress(self) -> str:
        return self._err.read_text()

    @property
    def file(self) -> UpFile:
        found = UpFile.read(self.data_dir)
        assert found is not None
        return found

    def descendants(self) -> dict[int, str]:
        """Command lines of all processes below it, by pid, from /proc."""
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
        found = [self.process.pid]
        for above in found:
            found += [pid for pid, parent in parents.items() if parent == above]
        lines = {}
        for pid in found[1:]:
            try:
                lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return lines

    def pid_of(self, words: str) -> int:
        [pid] = [pid for pid, line in self.descendants().items() if words in line]
        return pid

    def stop(self, stop_signal: signal.Signals = signal.SIGINT) -> int:
        """Send the signal, wait, and check that nothing is left of it; its exit code."""
        below = self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(stop_signal)
        try:
            code = self.process.wait(90)
        finally:
            deadline = time.monotonic() + 30  # a worker of a PostgreSQL that has ended is a moment behind it
            while (left := {pid: line for pid, line in below.items() if alive(pid)}) and time.monotonic() < deadline:
                time.sleep(0.05)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert left == {}, f"{left}\n{self.progress}"
        return code
