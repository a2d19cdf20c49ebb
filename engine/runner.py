"""Loads a model and runs one step of it: flat batch in, logits out."""

import logging
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.batch import BLOCK_TOKENS, FlatBatch, ModelConfig, moved
from engine.loader import open_checkpoint
from engine.models import build
from engine.models.decoder import Decoder
from engine.native import library
from engine.native.runner import NativeRunner, UnfitSizesError, open_runner

log = logging.getLogger("engine")

DType = Literal["float32", "bfloat16", "int8", "int4"]
KvType = Literal["int8"]
BITS = {"int8": 8, "int4": 4}


def default_dtype() -> DType:
    """The fastest that is exact enough on this machine: int8 needs dot products that do not saturate (VNNI or AMX)."""
    able = torch.cpu.get_capabilities()
    return "int8" if able.get("avx512_vnni") or able.get("amx_int8") else "bfloat16"


class ModelRunner:
    """A loaded model and its KV pools, run op by op. Not safe for two steps at once."""

    batch_invariant = False
    """Whether a row's result is the same bit for bit whatever its neighbours and however its prompt was cut."""

    def __init__(self, decoder: Decoder, backend: Backend) -> None:
        self._decoder, self._backend = decoder.on(backend.device), backend
        self._pools: list[Tensor] = []

    @property
    def config(self) -> ModelConfig:
        return self._decoder.config

    @property
    def block_bytes(self) -> int:
        """Bytes of KV in one block of 16 tokens, over all layers."""
        values = 2 * self.config.num_layers * BLOCK_TOKENS * self.config.num_kv_heads * self.config.head_dim
        return values * self._backend.kv_dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        """Make (or make anew, emptied) the KV pool of `num_blocks` blocks."""
        self._pools = []
        size = num_blocks * BLOCK_TOKENS, self.config.num_kv_heads, self.config.head_dim
        self._pools = [self._backend.new_kv(*size) for _ in range(self.config.num_layers)]

    def hidden(self, batch: FlatBatch) -> Tensor:
        """Write the batch's KV and return the final-norm hidden states [T, hidden] float32 of all its rows."""
        return self._step(moved(batch, self._backend.device)).float()

    def forward(self, batch: FlatBatch) -> Tensor:
        """Write the batch's KV and return [L, vocab] float32 logits of `batch.logits_rows`."""
        batch = moved(batch, self._backend.device)
        hidden = self._step(batch)
        with torch.inference_mode():
            return self._decoder.logits(hidden.index_select(0, batch.logits_rows))

    def choose(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        """The next token [L] of each row of logits [L, vocab], all on one device; see engine.sampling.choose."""
        return self._backend.choose(logits, temperature, top_k, top_p, min_p, uniform)

    def _step(self, batch: FlatBatch) -> Tensor:
        if not self._pools:
            raise RuntimeError("allocate() the KV pool before the first step")
        with torch.inference_mode():
            return self._decoder.hidden(self._backend, batch, self._pools)


def load(
    path: Path, dtype: DType, threads: int | None = None, device: str = "cpu", kv: KvType | None = None
) -> ModelRunner | NativeRunner:
    """Load a `.gguf` file or a Hugging Face folder.

    `float32` is the reference, `bfloat16` halves the bytes, `int8` quantises weights and activations and `int4` the
    weights further; these two are for the CPU, and fast there. `kv`: "int8" halves the KV cache of an int8 or int4
    model. `threads`: cores for torch, all by default. `device`: "cpu", or torch's name of an NVIDIA or AMD device, like
    "cuda". Raises engine.loader.ModelFileError for a file that is damaged or that Farthing cannot run, and ValueError
    for a dtype or KV cache that the device or this machine does not have.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    place = torch.device(device)
    with torch.inference_mode():
        if place.type != "cpu" and (dtype in BITS or kv is not None):
            raise ValueError(f"int8 and int4 run on the CPU only so far: take bfloat16 on {device}")
        if dtype in BITS:
            try:
                if (found := library()) is not None:
                    return open_runner(path, BITS[dtype], found, kv_int8=kv == "int8")
                problem = (
                    "this machine has no compiled decoder: a CPU with AVX512-VNNI, and g++ at first start, are needed"
                )
            except UnfitSizesError as error:
                problem = str(error)
            if dtype == "int4" or kv is not None:
                raise ValueError(f"{dtype} with a {kv or 'bfloat16'} KV cache cannot run: {problem}")
            log.warning("Running int8 op by op, which is much slower: %s", problem)
        elif kv is not None:
            raise ValueError(f"an int8 KV cache goes with int8 or int4 weights: leave it out with {dtype}")
        backend = _backend(dtype, place)
        return ModelRunner(build(open_checkpoint(path), backend), backend)


def _backend(dtype: DType, device: torch.device) -> Backend:
    if device.type == "cpu":
        return CpuBackend(dtype)
    from engine.backends.triton import TritonBackend  # here, because Triton is not there on every system

    return TritonBackend(torch.float32 if dtype == "float32" else torch.bfloat16, device)
