"""The GPU benchmark where there is no GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_without_a_gpu() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("No GPU: torch sees no NVIDIA or AMD device here")
