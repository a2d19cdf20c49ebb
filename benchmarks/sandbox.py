"""Runs a program that a model wrote: no network, no files written, no processes, bounded processor time and memory.

The program runs in a child of its own, `python -m benchmarks.sandbox`, which gives up what it may do before it looks at
the program: a network namespace that is empty, another user where it is root, and resource limits.
"""

import ctypes
import enum
import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NOBODY = 65534
MEMORY = 512 << 20
NOT_ISOLATED, RAN_TO_ITS_END = 97, 98
"""Exit codes of the child: it could not give up the network and so did not run the program; nothing was raised. A
program that ends itself by exit() has neither."""
IMPORTED = ["bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "hashlib", "heapq"]
IMPORTED += ["itertools", "math", "operator", "random", "re", "statistics", "string", "sys", "typing"]
"""Loaded before rights are given up: the library may lie where another user may not read."""


class Verdict(enum.Enum):
    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"


class IsolationError(RuntimeError):
    """This machine does not let a process give up the network; the program was not run."""


def run(program: str, seconds: int = 10) -> Verdict:
    """Whether `program` runs to its end within `seconds`, nothing raised. Raises IsolationError, see there."""
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", __file__, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            child.communicate(program.encode(), timeout=seconds + 2)
        except subprocess.TimeoutExpired:
            return Verdict.TIMED_OUT
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if child.returncode == NOT_ISOLATED:
        raise IsolationError("the kernel refused a network namespace, so generated code was not run")
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Verdict.TIMED_OUT
    return Verdict.PASSED if child.returncode == RAN_TO_ITS_END else Verdict.FAILED


def _give_up_rights(seconds: int) -> None:
    flags = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWNET | CLONE_NEWUSER
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        os._exit(NOT_ISOLATED)
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    if os.geteuid() == 0:  # after the limits: root may not be bound by RLIMIT_NPROC, another user is
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _main() -> None:
    program = sys.stdin.buffer.read().decode()
    for name in IMPORTED:
        importlib.import_module(name)
    _give_up_rights(int(sys.argv[1]))
    exec(compile(program, "<generated>", "exec"), {"__name__": "__main__"})
    os._exit(RAN_TO_ITS_END)


if __name__ == "__main__":
    _main()
