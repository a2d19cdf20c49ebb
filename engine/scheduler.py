"""Decides what each step computes: decode tokens first, then as much prefill as the token budget allows.

Requests are served in order of arrival. Every running request arrived before every waiting one; under memory pressure
the latest running one gives its blocks back and waits at the front, to be computed again. The oldest is never
preempted for another, and alone it fits (its `max_len` is at most the pool), so every cycle makes progress.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import BLOCK_TOKENS, FlatBatch
from engine.block_manager import ROOT, BlockManager, token_bytes
from engine.sequence import Sequence

MAX_RUNNING = 256
"""Most sequences in one step."""


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


class Scheduler:
    """Waiting and running sequences of one model, and the block table of the running ones.

    `max_batch_tokens` bounds a step's tokens, `max_context` a sequence's tokens.
    """

    def __init__(self, manager: BlockManager, max_batch_tokens: int, max_context: int) -> None:
        self.manager = manager
        self.max_batch_tokens = max_batch_tokens
        rows = min(MAX_RUNNING, max_batch_tokens)  # so that every running sequence can decode in every step
        width = blocks_for(min(max_context, manager.num_blocks * BLOCK_TOKENS))
        self.table = np.zeros((rows, width), dtype=np.int32)
        self._free_rows = list(range(rows - 1, -1, -1))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._refused: tuple[Sequence, int] | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new arrival."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence, now: float) -> None:
        """Forget a finished or aborted sequence, in whatever state, and give its blocks back."""
        if sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._give_back(sequence, now)

    def schedule(self, now: float) -> list[Chunk]:
        """The next step's chunks, blocks allocated. Not empty when there is work."""
        preempted_before = self.preemptions
        chunks = self._decode(now)
        budget = self.max_batch_tokens - len(chunks)
        for sequence in self.running:
            if budget and sequence.remaining > 1:
                end = sequence.computed + min(budget, sequence.remaining)
                chunks.append(Chunk(sequence, sequence.computed, end))
                budget -= end - sequence.computed
        # What was just preempted must not come back in the same breath.
        while budget and self.preemptions == preempted_before and self._admit(now):
            sequence = self.running[-1]
            end = sequence.computed + min(budget, sequence.remaining)
            chunks.append(Chunk(sequence, sequence.computed, end))
            budget -= end - sequence.computed
        return chunks

    def commit(self, chunks: list[Chunk]) -> None:
        """Record that the step ran: these chunks' KV is in the pool, and blocks they filled can be found by others."""
        for sequence, start, end in chunks:
            sequence.recomputed_tokens += max(0, min(end, sequence.peak_computed) - start)
            sequence.peak_computed = max(sequence.peak_computed, end)
            sequence.computed = end
            if sequence.registered < end // BLOCK_TOKENS and not sequence.collided:
                self._register(sequence)

    def batch(self, chunks: list[Chunk]) -> FlatBatch:
        """The chunks laid end to end as tensors."""
        token_ids: list[int] = []
        for sequence, start, end in chunks:
            token_ids += sequence.tokens[start:end]
        starts = np.array([chunk.start for chunk in chunks])
        ends = np.array([chunk.end for chunk in chunks])
        offsets = np.concatenate(([0], np.cumsum(ends - starts)))
        owner = np.repeat(np.arange(len(chunks)), ends - starts)
        positions = np.arange(offsets[-1]) - (offsets[:-1] - starts)[owner]
        rows = np.array([chunk.sequence.row for chunk in chunks])
        table = self.table[rows, : blocks_for(int(ends.max()))]
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

    def check(self) -> None:
        """Raise AssertionError unless pool, table and queues agree. For tests."""
        self.manager.check([sequence.blocks for sequence in self.running])
        order = [sequence.arrived for sequence in [*self.running, *self.waiting]]
        assert order == sorted(order), "a later arrival runs before an earlier one"
        assert all(not sequence.blocks and sequence.row is None for sequence in self.waiting)
        for sequence in self.running:
            row = self.table[sequence.row]
            assert row[: len(sequence.blocks)].tolist() == sequence.blocks and not row[len(sequence.blocks) :].any()
            assert blocks_for(sequence.computed) <= len(sequence.blocks)
        assert len(self._free_rows) + len(self.running) == len(self.table)

    def _decode(self, now: float) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in tuple(self.running):
            if sequence.row is None or sequence.remaining != 1:
                continue
            # Victims come after `sequence` in order of arrival, so they are in no chunk yet.
            while not self._grow(sequence, now):
                victim = self.running[-1]
                self._preempt(victim, now)
                if victim is sequence:
                    break
            else:
                chunks.append(Chunk(sequence, sequence.computed, sequence.computed + 1))
        return chunks

    def _grow(self, sequence: Sequence, now: float) -> bool:
        """Have a block for the sequence's next token; False when the pool is empty."""
        count = len(sequence.blocks)
        if len(sequence.tokens) <= count * BLOCK_TOKENS:
            return True
        new = self.manager.allocate(1)
        if new is None:
            return False
        sequence.settle_blocks(now)
        sequence.blocks += new
        self.table[sequence.row, count] = new[0]
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self.running.pop()
        self._give_back(sequence, now)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _give_back(self, sequence: Sequence, now: float) -> None:
        sequence.settle_blocks(now)
        self.manager.release(sequence.blocks)
        assert sequence.row is not None
        self.table[sequence.row, : len(sequence.blocks)] = 0
        self._free_rows.append(sequence.row)
        sequence.row = None
        sequence.blocks = []
        sequence.computed = sequence.registered = 0
        sequence.collided = False

    def _admit(self, now: float) -> bool:
        """Start the longest-waiting sequence with all blocks of its present tokens, reusing what the cache has."""
        if not self.waiting or not self._free_rows:
            return False
        sequence = self.waiting[0]
        if self._refused == (sequence, self.manager.available):
            return False
        # At least one token is always computed: its logits are what we are here for.
        reusable = (len(sequence.tokens) - 1) // BLOCK_TOKENS
        self.manager.extend_hashes(sequence.hashes, sequence.salt, sequence.tokens, reusable)
        shared = self.manager.match(sequence.hashes[:reusable], sequence.salt, sequence.tokens)
        fresh = blocks_for(len(sequence.tokens)) - len(shared)
        if not self.manager.can_take(shared, fresh):
            self._refused = (sequence, self.manager.available)
            return False
        self.waiting.popleft()
        self.manager.acquire(shared)
        allocated = self.manager.allocate(fresh)
        assert allocated is not None
        sequence.settle_blocks(now)
        sequence.blocks = shared + allocated
        sequence.row = self._free_rows.pop()
        self.table[sequence.row, : len(sequence.blocks)] = sequence.blocks
        sequence.registered = len(shared)
        sequence.computed = len(shared) * BLOCK_TOKENS
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            sequence.peak_computed = sequence.computed
            sequence.admitted = now
        self.running.append(sequence)
        return True

    def _register(self, sequence: Sequence) -> None:
        full = sequence.computed // BLOCK_TOKENS
        self.manager.extend_hashes(sequence.hashes, sequence.salt, sequence.tokens, full)
        for i in range(sequence.registered, full):
            content = token_bytes(sequence.tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
            parent = sequence.blocks[i - 1] if i else ROOT
            block = self.manager.register(sequence.blocks[i], parent, sequence.hashes[i], sequence.salt, content)
            if block is None:
                sequence.collided = True
                return
            sequence.blocks[i] = block
            self.table[sequence.row, i] = block
            sequence.registered = i + 1
