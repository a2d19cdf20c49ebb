"""Loads a model and runs one step of it: flat batch in, logits out."""

from pathlib import Path

import torch
from torch import Tensor

from engine.backends.cpu import CpuBackend, DType
from engine.batch import BLOCK_TOKENS, FlatBatch, ModelConfig
from engine.loader import open_checkpoint
from engine.models import Model, build
from engine.native import kernels


class ModelRunner:
    """A loaded model and its KV pools. Not safe for two steps at once."""

    def __init__(self, config: ModelConfig, model: Model, backend: CpuBackend) -> None:
        self.config = config
        self._model, self._backend = model, backend
        self._pools: list[Tensor] = []

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

    def forward(self, batch: FlatBatch) -> Tensor:
        """Write the batch's KV and return [L, vocab] float32 logits of `batch.logits_rows`."""
        if not self._pools:
            raise RuntimeError("allocate() the KV pool before the first forward()")
        with torch.inference_mode():
            return self._model.forward(batch, self._pools)


def load(path: Path, dtype: DType, threads: int | None = None) -> ModelRunner:
    """Load a `.gguf` file or a Hugging Face folder for the CPU.

    `float32` is the reference, `bfloat16` halves the bytes, `int8` quantises weights and activations and is the
    fastest. `threads`: cores for torch, all by default. Raises engine.loader.ModelFileError for a file that is damaged
    or that Farthing cannot run.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        checkpoint = open_checkpoint(path)
        backend = CpuBackend(dtype, kernels())
        return ModelRunner(checkpoint.config, build(checkpoint, backend), backend)
