"""Child processes that are stopped politely, and that never outlive us: when we die, the kernel stops them."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # looked up here: a forked child running as another user may not read our modules


def die_with_parent(stop_signal: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn` that has the kernel send `stop_signal` to the child once its parent is gone.

    Linux only, elsewhere a no-op. The kernel watches the *thread* that forked, so call Popen from the main thread.
    It must run after any change of user, which clears the setting (subprocess does it in that order).
    """
    parent = os.getpid()

    def ask_kernel() -> None:
        if sys.platform == "linux":
            _LIBC.prctl(_PR_SET_PDEATHSIG, stop_signal)
            if os.getppid() != parent:  # it died between the fork and the line above
                os._exit(1)

    return ask_kernel


class Child(ABC):
    """One part of Farthing running as a process of its own, its output going to the file `log`.

    `stop_signal` asks it to finish what it has begun; after `patience` seconds it is killed.
    """

    def __init__(self, name: str, log: Path, stop_signal: signal.Signals, patience: float) -> None:
        self.name = name
        self.log = log
        self._stop_signal = stop_signal
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def start(self) -> None:
        """Start the process, or start it anew."""

    def spawn(
        self, command: Sequence[str | Path], env: dict[str, str] | None = None, user: str | None = None
    ) -> subprocess.Popen[bytes]:
        """Start `command` in a session of its own: a Ctrl-C in the terminal reaches us only; we choose the order."""
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                user=user,
                group=user,
                extra_groups=[] if user else None,
                start_new_session=True,
                preexec_fn=die_with_parent(self._stop_signal),
            )
        return self._process

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self._process.poll() if self._process is not None else 0

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask it to stop and wait; kill it when its patience is over or `hurry()` turns true."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(self._stop_signal)
        deadline = time.monotonic() + self._patience
        while self._process.poll() is None and time.monotonic() < deadline and not hurry():
            time.sleep(0.02)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def last_lines(self, count: int = 15) -> str:
        """The tail of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


class PythonChild(Child):
    """`python -m module …` as a child. `-P` keeps the current folder out of its import path."""

    def __init__(self, name: str, log: Path, arguments: list[str], env: dict[str, str], patience: float) -> None:
        super().__init__(name, log, signal.SIGTERM, patience)
        self._command = [sys.executable, "-P", "-m", *arguments]
        self._env = {**os.environ, **env}

    def start(self) -> None:
        self.spawn(self._command, self._env)
