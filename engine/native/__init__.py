"""Small C++ kernels for the CPU, compiled on first use where there is a compiler and kept for later starts.

`kernels()` is None without a compiler, and the torch code that each kernel has a twin of runs instead.
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
from torch import Tensor

log = logging.getLogger("engine")

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
COMPILE_SECONDS = 120

_LONG, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Kernels:
    """The compiled functions. Tensors must be on the CPU; a row's elements must be neighbours in memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attention = library.decode_attention
        self._attention.argtypes = [_POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, *[_LONG] * 4, _FLOAT]
        self._attention.argtypes += [_LONG, _POINTER]
        self._rms_norm = library.rms_norm
        self._rms_norm.argtypes = [_POINTER, _POINTER, _FLOAT, _LONG, _LONG, _POINTER]
        self._quantise = library.quantise
        self._quantise.argtypes = [_POINTER, _LONG, _LONG, _POINTER, _POINTER]
        for function in (self._attention, self._rms_norm, self._quantise):
            function.restype = None

    def decode_attention(
        self, queries: Tensor, pool: Tensor, blocks: Tensor, contexts: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """[S, H, D] float32 queries, one new token a sequence, over a [slots, 2 * kv heads, D] bfloat16 pool.

        `blocks` [S, B] int32 and `contexts` [S] int32 as in FlatBatch. Returns [S, H * D] float32.
        """
        sequences, heads, dim = queries.shape
        kv_heads = pool.shape[1] // 2
        if queries.stride()[1:] != (dim, 1):
            queries = queries.contiguous()
        out = torch.empty(sequences, heads * dim)
        self._attention(
            queries.data_ptr(),
            queries.stride(0),
            pool.data_ptr(),
            blocks.data_ptr(),
            blocks.stride(0),
            contexts.data_ptr(),
            sequences,
            kv_heads,
            heads // kv_heads,
            dim,
            scale,
            window or 0,
            out.data_ptr(),
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The last dimension of a float32 tensor, normalised and weighted."""
        x = x.contiguous()
        size = x.shape[-1]
        out = torch.empty_like(x)
        self._rms_norm(x.data_ptr(), weight.data_ptr(), eps, x.numel() // size, size, out.data_ptr())
        return out

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, K] float32 to uint8 around 128, and [T, 1] float32: the magnitude that became 127 steps."""
        x = x.contiguous()
        rows, size = x.shape
        out, largest = torch.empty(rows, size, dtype=torch.uint8), torch.empty(rows, 1)
        self._quantise(x.data_ptr(), rows, size, out.data_ptr(), largest.data_ptr())
        return out, largest


@functools.cache
def kernels() -> Kernels | None:
    """The kernels, compiled now if they have not been on this machine; None where they cannot be."""
    try:
        return Kernels(ctypes.CDLL(str(_library())))
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()[:500]
        log.warning("Decoding without the native kernels, which is slower: %s", reason)
        return None


def _library() -> Path:
    """Path of the compiled library. Raises FileNotFoundError without a compiler, or what compiling raised."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler (install g++, or name one in CXX)")
    # -march=native: a library is good for one kind of CPU, and a home folder may be seen from several.
    parts = (SOURCE.read_text(), *FLAGS, compiler, str(sorted(torch.cpu.get_capabilities().items())))
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "farthing" / "native"
    target = folder / f"{name}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            command = [*compiler.split(), *FLAGS, str(SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            made.replace(target)
    return target
