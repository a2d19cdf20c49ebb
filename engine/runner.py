"""Loads a model and runs one step of it: flat batch in, logits out."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.batch import BLOCK_TOKENS, FlatBatch, ModelConfig
from engine.loader import open_checkpoint
from engine.models import build
from engine.models.decoder import Decoder

DType = Literal["float32", "bfloat16", "int8"]


def default_dtype() -> DType:
    """The fastest that is exact enough on this machine: int8 needs dot products that do not saturate (VNNI or AMX)."""
    able = torch.cpu.get_capabilities()
    return "int8" if able.get("avx512_vnni") or able.get("amx_int8") else "bfloat16"


class ModelRunner:
    """A loaded model and its KV pools, run op by op. Not safe for two steps at once."""

    batch_invariant = False
    """Whether a row's result is the same bit for bit whatever its neighbours and however its prompt was cut."""

    def __init__(self, decoder: Decoder, backend: Backend) -> None:
        self._decoder, self._backend = decoder, backend
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
        if not self._pools:
            raise RuntimeError("allocate() the KV pool before the first step")
        with torch.inference_mode():
            return self._decoder.hidden(self._backend, batch, self._pools)

    def forward(self, batch: FlatBatch) -> Tensor:
        """Write the batch's KV and return [L, vocab] float32 logits of `batch.logits_rows`."""
        hidden = self.hidden(batch)
        with torch.inference_mode():
            return self._decoder.logits(hidden.index_select(0, batch.logits_rows))


def load(path: Path, dtype: DType, threads: int | None = None) -> ModelRunner:
    """Load a `.gguf` file or a Hugging Face folder for the CPU.

    `float32` is the reference, `bfloat16` halves the bytes, `int8` quantises weights and activations and is the
    fastest. `threads`: cores for torch, all by default. Raises engine.loader.ModelFileError for a file that is damaged
    or that Farthing cannot run.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        backend = CpuBackend(dtype)
        return ModelRunner(build(open_checkpoint(path), backend), backend)
