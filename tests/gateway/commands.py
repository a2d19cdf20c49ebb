"""The `farthing` command: as a process of its own, or in this one, which spares the second that imports take."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from gateway.cli import app

FARTHING = Path(sys.executable).with_name("farthing")
COLUMNS = "60"


class Outcome(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def farthing(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FARTHING, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": COLUMNS, **environment},
        timeout=60,
        check=False,
    )


def farthing_inside(*arguments: str, **environment: str) -> Outcome:
    """The same in this process, in a thread, for it runs an event loop; the caller's stands still meanwhile, so that
    nothing else is printed. What a process would die of with a traceback is raised."""
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(CliRunner().invoke, app, arguments, env={"COLUMNS": COLUMNS, **environment}).result()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)
