"""Lays a step's chunks end to end as the tensors that the runner takes."""

from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import BLOCK_TOKENS, FlatBatch
from engine.sequence import Sequence


class Chunk(NamedTuple):
    """Tokens `start:end` of a sequence, computed in one step. The next token is sampled when they are its last ones."""

    sequence: Sequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens)


def blocks_for(tokens: int) -> int:
    """Blocks that `tokens` tokens fill, the last one perhaps in part."""
    return -(-tokens // BLOCK_TOKENS)


def flat_batch(chunks: List[Chunk], block_table: NDArray[np.int32]) -> FlatBatch:
    """The chunks as one batch; `block_table` [rows, blocks] has each sequence's blocks in its row."""
    token_ids: list[int] = []
    for sequence, start, end in chunks:
        token_ids += sequence.tokens[start:end]
    starts = np.array([chunk.start for chunk in chunks])
    ends = np.array([chunk.end for chunk in chunks])
    offsets = np.concatenate(([0], np.cumsum(ends - starts)))
    owner = np.repeat(np.arange(len(chunks)), ends - starts)
    positions = np.arange(offsets[-1]) - (offsets[:-1] - starts)[owner]
    rows = np.array([chunk.sequence.row for chunk in chunks])
    table = block_table[rows, : blocks_for(int(ends.max()))]
    slots = table[owner, positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS
    last_rows = [int(offsets[i + 1]) - 1 for i, chunk in enumerate(chunks) if chunk.samples]
    return FlatBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        query_starts=tuple(offsets.tolist()),
        context_lens=tuple(ends.tolist()),
        block_tables=torch.from_numpy(table),
        logits_rows=torch.tensor(last_rows, dtype=torch.int64),
    )
