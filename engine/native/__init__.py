"""The C++ decoder for the CPU: a whole step in one call, over int8 or int4 weights.

`library()` is None where it cannot run (no compiler and no prebuilt library, or a CPU without AVX512-VNNI); the torch
code in engine.backends, which it is tested against, runs instead.
"""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

log = logging.getLogger("engine")

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "decoder.cpp"
FLAGS = ("-O3", "-std=c++20", "-fno-math-errno", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")
"""Without contraction: whether a product and a sum are rounded once or twice must not depend on what is inlined."""
COMPILE_SECONDS = 300


def able() -> bool:
    """Whether this CPU has the instructions that the decoder is written for."""
    return bool(torch.cpu.get_capabilities().get("avx512_vnni"))


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled decoder, compiled now if it has not been on this machine; None where it cannot be."""
    if not able():
        return None
    try:
        return ctypes.CDLL(str(compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()[:500]
        log.warning("The decoder could not be compiled: %s", reason)
        return None


def compiled(folder: Path | None = None) -> Path:
    """Path of the compiled library: one that was built ahead of time beside the source, or one kept in `folder`.

    Raises FileNotFoundError without a compiler, or what compiling raised.
    """
    name = f"decoder-{_fingerprint()}.so"
    if (FOLDER / name).exists():
        return FOLDER / name
    folder = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farthing" / "native"
    target = folder / name
    if not target.exists():
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise FileNotFoundError("there is no C++ compiler (install g++, or name one in CXX)")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / name
            command = [*compiler.split(), *FLAGS, *_instructions(), str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            made.replace(target)
    return target


def _instructions() -> list[str]:
    """What the compiler may use. Named one by one, not -march=native: an image is built on one machine for another."""
    sets = ["f", "bw", "dq", "vl", "vnni"]
    if torch.cpu.get_capabilities().get("avx512_bf16"):
        sets.append("bf16")
    return [*(f"-mavx512{name}" for name in sets), "-mfma", "-mf16c", "-mavx2", "-mtune=native"]


def _fingerprint() -> str:
    """Of the sources and of how they are compiled."""
    sources = [*sorted(FOLDER.glob("*.h")), SOURCE]
    parts = [*(path.read_text() for path in sources), *FLAGS, *_instructions()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
