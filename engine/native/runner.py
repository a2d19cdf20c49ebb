"""A model whose steps the compiled decoder runs, each in one call."""

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.backends.base import Embedding, Linear
from engine.batch import FlatBatch
from engine.loader import open_checkpoint
from engine.models import build
from engine.models.decoder import Decoder
from engine.native.cache import packed
from engine.native.packing import Packed, interleave_halves, pack
from engine.native.structs import CStep, DecoderStruct
from engine.sampling import choose

ALIGNMENT = 64
LARGEST_HEAD = 1024


class Packer:
    """The part of a backend that a checkpoint is read into. The weights run in the compiled decoder only.

    Embeddings and output heads are int8 even in an int4 model: they are where a coarse weight hurts most.
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return pack(weight, bias, self._bits)

    def head(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return pack(weight, bias, 8)

    def embedding(self, table: Tensor, head: Linear | None) -> Embedding:
        return head or pack(table, None, 8)


class UnfitSizesError(Exception):
    """The compiled decoder cannot take a model of these sizes."""


def read(source: Path, bits: int) -> Decoder:
    """The model file or folder with its weights packed. Raises ModelFileError or UnfitSizesError."""
    checkpoint = open_checkpoint(source)
    head_dim = checkpoint.config.head_dim
    if checkpoint.config.intermediate_size % 16 or head_dim % 2 or head_dim > LARGEST_HEAD:
        raise UnfitSizesError(
            f"{source}: its feed-forward size is not a multiple of 16, or its head size is odd or over {LARGEST_HEAD}"
        )
    decoder = build(checkpoint, Packer(bits))
    layers = [replace(layer, gate_up=interleave_halves(_packed(layer.gate_up))) for layer in decoder.layers]
    return replace(decoder, layers=tuple(layers))


def _packed(linear: Linear) -> Packed:
    assert isinstance(linear, Packed)
    return linear


class NativeRunner:
    """The same face as engine.runner.ModelRunner. Not safe for two steps at once."""

    batch_invariant = True

    def __init__(self, decoder: Decoder, library: ctypes.CDLL, *, kv_int8: bool = False) -> None:
        """`decoder`: from `read`. `kv_int8`: keys and values in int8 with a scale a head and token, not bfloat16."""
        self.config = decoder.config
        self._native = DecoderStruct(decoder, kv_int8)
        self._address = ctypes.addressof(self._native.struct)
        self._scratch_bytes, self._step = library.scratch_bytes, library.run_step
        self._scratch_bytes.argtypes, self._scratch_bytes.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
        self._step.argtypes, self._step.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        library.kv_block_bytes.argtypes, library.kv_block_bytes.restype = [ctypes.c_void_p], ctypes.c_int64
        self._layer_block_bytes: int = library.kv_block_bytes(self._address)
        self._vocabulary = self._native.struct.head.rows
        self._pools: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        self._scratch = _aligned(0)
        self._threads = torch.get_num_threads()

    @property
    def block_bytes(self) -> int:
        """Bytes of KV in one block of 16 tokens, over all layers."""
        return self._layer_block_bytes * self.config.num_layers

    def allocate(self, num_blocks: int) -> None:
        """Make (or make anew, emptied) the KV pool of `num_blocks` blocks."""
        self._pools = []
        self._pools = [_aligned(num_blocks * self._layer_block_bytes) for _ in range(self.config.num_layers)]
        self._native.set_pools([pool.ctypes.data for pool in self._pools])

    def forward(self, batch: FlatBatch) -> Tensor:
        """Write the batch's KV and return [L, vocab] float32 logits of `batch.logits_rows`."""
        logits = torch.empty(len(batch.logits_rows), self._vocabulary)
        self._run(batch, batch.logits_rows, logits, None)
        return logits[:, : self.config.vocab_size]

    def hidden(self, batch: FlatBatch) -> Tensor:
        """Write the batch's KV and return the final-norm hidden states [T, hidden] float32 of all its rows."""
        states = torch.empty(len(batch.token_ids), self.config.hidden_size)
        self._run(batch, batch.logits_rows[:0], None, states)
        return states

    def choose(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        """The next token [L] of each row of logits [L, vocab]; see engine.sampling.choose."""
        return choose(logits, temperature, top_k, top_p, min_p, uniform)

    def _run(self, batch: FlatBatch, logits_rows: Tensor, logits: Tensor | None, states: Tensor | None) -> None:
        if not self._pools:
            raise RuntimeError("allocate() the KV pool before the first step")
        tokens = len(batch.token_ids)
        needed = self._scratch_bytes(self._address, tokens)
        if needed > len(self._scratch):
            self._scratch = _aligned(needed)
        starts = np.array(batch.query_starts, dtype=np.int32)
        tables = batch.block_tables.contiguous()
        step = CStep(
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slot_mapping.data_ptr(),
            query_starts=starts.ctypes.data,
            tables=tables.data_ptr(),
            logits_rows=logits_rows.data_ptr(),
            tokens=tokens,
            sequences=len(batch.context_lens),
            table_stride=tables.shape[1],
            num_logits=len(logits_rows),
            logits=0 if logits is None else logits.data_ptr(),
            hidden=0 if states is None else states.data_ptr(),
            scratch=self._scratch.ctypes.data,
        )
        self._step(self._address, ctypes.addressof(step), self._threads)


def open_runner(source: Path, bits: int, library: ctypes.CDLL, *, kv_int8: bool = False) -> NativeRunner:
    """Load a model file or folder, from the cache of packed models where it is in there.

    Raises ModelFileError or UnfitSizesError.
    """
    return NativeRunner(packed(source, bits, lambda: read(source, bits)), library, kv_int8=kv_int8)


def _aligned(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeros that start at a multiple of ALIGNMENT: pages that the kernel hands out on first use."""
    raw = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]
