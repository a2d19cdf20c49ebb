"""The Triton kernels and whole models on them, in Triton's interpreter.

In a process of its own, because the interpreter has to be chosen before anything imports triton.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("part", ["kernels.py", "model.py"])
def test_in_the_interpreter(part: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "device" / part],
        cwd=HERE.parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    print(run.stdout[-1000:])
