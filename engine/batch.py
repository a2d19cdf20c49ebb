"""One step's work as tensors: the flat token batch every model and backend takes."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)

BLOCK_TOKENS = 16
"""Tokens of KV in one block, the unit of paging, hashing and reuse."""


def moved(record: "Record", device: torch.device) -> "Record":
    """The dataclass with its own tensors on `device`; itself when it is the CPU, where all are made."""
    if device.type == "cpu":
        return record
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return replace(record, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the scheduler and the server need to know of a loaded model. Lengths and sizes in tokens or elements."""

    architecture: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_eps: float
    rope_theta: float
    tied_embeddings: bool


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """S sequences' new tokens laid end to end: T tokens in all. Made on the CPU; the runner moves it to its device.

    Sequence s owns rows `query_starts[s]:query_starts[s + 1]`; its context after this step is `context_lens[s]` tokens,
    the last of which are those rows. The KV of row t is written to slot `slot_mapping[t]` = block * 16 + offset before
    attention reads it.
    """

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64, position in its sequence"""
    slot_mapping: Tensor
    """[T] int64"""
    query_starts: tuple[int, ...]
    """S + 1 offsets, first 0, last T"""
    context_lens: tuple[int, ...]
    """S lengths"""
    block_tables: Tensor
    """[S, B] int32, padded with 0 past a sequence's own blocks"""
    logits_rows: Tensor
    """[L] int64, the rows whose next-token logits are wanted"""
