"""The C++ decoder for the CPU: a whole step in one call, over int8 or int4 weights.

`library()` is None where it cannot run (a CPU without AVX512-VNNI, or neither a compiler nor a prebuilt library); the
torch code in engine.backends, which it is tested against, runs instead.
"""

import contextlib
import ctypes
import functools
import logging
import subprocess
import tempfile
from pathlib import Path

import torch

from engine.native.compile import FOLDER, build, file_name, user_cache

log = logging.getLogger("engine")


def able() -> bool:
    """Whether this CPU has the instructions that the decoder is written for."""
    return bool(torch.cpu.get_capabilities().get("avx512_vnni"))


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled decoder, compiled now if it has not been on this machine; None where it cannot be."""
    if not able():
        return None
    bf16 = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    try:
        ahead_of_time = FOLDER / file_name(bf16)
        return ctypes.CDLL(str(ahead_of_time)) if ahead_of_time.exists() else _compiled(bf16)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()[:500]
        log.warning("The decoder could not be compiled: %s", reason)
        return None


def _compiled(bf16: bool) -> ctypes.CDLL:
    """Kept in the user's cache; where that cannot be written, compiled at every start."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(build(user_cache() / "native", bf16)))
    with tempfile.TemporaryDirectory() as scratch:  # what is loaded needs its file no longer
        return ctypes.CDLL(str(build(Path(scratch), bf16)))
