"""The Triton kernels and whole models on them, in Triton's interpreter.

In a process of its own, because the interpreter has to be chosen before anything imports triton.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.backends.triton import TritonBackend
from engine.kernels import INTERPRETED
from engine.runner import load

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


def test_refuses_what_it_cannot_run() -> None:
    with pytest.raises(ValueError, match="int8 and int4 run on the CPU only so far: take bfloat16 on cuda"):
        load(Path("any.gguf"), "int8", device="cuda")
    with pytest.raises(ValueError, match="choose that with CUDA_VISIBLE_DEVICES"):
        TritonBackend(torch.bfloat16, torch.device("cuda:1"))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no GPU here"):
            load(Path("any.gguf"), "bfloat16", device="cuda")
    if not INTERPRETED:
        with pytest.raises(ValueError, match="TRITON_INTERPRET=1 only: use the CPU backend"):
            TritonBackend(torch.float32, torch.device("cpu"))
