"""Decides what each step computes: decode tokens first, then as much prefill as the token budget allows.

Whom prefill goes to: the lowest `priority` first; then the tenant that has been served least (`fairness`); then the
earliest arrival. While several tenants are about, one that is well ahead of the others gets a small part of a step, so
that they do not wait long for the step in progress.

Memory: a request that says how much it will produce starts only once all of that is sure to fit, and is never
preempted for lack of it. One that leaves it open would have to reserve the whole pool: it gets room for its prompt and
a little more, and when the pool runs out, the latest such request gives its blocks back and waits, to be computed
again, with twice that room the next time. The earliest gives way to none of them, and alone it fits (its `max_len` is
at most the pool), so every cycle makes progress. Besides, a request may displace one of a later priority, and one of a
tenant that has less than its share the latest ones, never the first, of a tenant that has more.
"""

from bisect import insort
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from engine.batch import BLOCK_TOKENS, FlatBatch
from engine.block_manager import BLOCK_BYTES, ROOT, BlockManager, token_bytes
from engine.fairness import Fairness
from engine.layout import Chunk, blocks_for, flat_batch
from engine.preemption import Pool, Shortage, displaced_by, victim_for
from engine.sequence import Sequence
from engine.waiting import Rank, Waiting, rank

MAX_RUNNING = 256
"""Most sequences in one step."""

BURST_STEPS = 4
"""Full steps of prefill by which a tenant that was away may get ahead of the others."""

HEADROOM = 32
"""Tokens of answer that a request of open length has room for when it starts; doubled with each preemption."""


class Fit(NamedTuple):
    """What it takes to start a sequence."""

    shared: list[int]
    """Blocks found in the cache."""
    fresh: int
    """Blocks to allocate now."""
    promised: int
    """Blocks it may count on in all, those included."""
    missing: int
    """Blocks too few for that; 0 or less when it fits."""


class Scheduler:
    """Waiting and running sequences of one model, and the block table of the running ones.

    `max_batch_tokens` bounds a step's tokens, `max_context` a sequence's tokens; `decode_weight` is what a decode token
    costs a tenant, in tokens of prefill.
    """

    def __init__(
        self, manager: BlockManager, max_batch_tokens: int, max_context: int, decode_weight: float = 2.0
    ) -> None:
        self.manager = manager
        self.max_batch_tokens = max_batch_tokens
        self.quantum = min(max_batch_tokens, max(BLOCK_TOKENS, max_batch_tokens // 8))
        """Tokens a step that a tenant gets at most while it is well ahead of others."""
        rows = min(MAX_RUNNING, max_batch_tokens)  # so that every running sequence can decode in every step
        width = blocks_for(min(max_context, manager.num_blocks * BLOCK_TOKENS))
        self.table = np.zeros((rows, width), dtype=np.int32)
        self._pool = Pool(manager.num_blocks, rows)
        self._free_rows = list(range(rows - 1, -1, -1))
        self.waiting = Waiting()
        self.running: list[Sequence] = []
        """By priority, then arrival."""
        self.fairness = Fairness(BURST_STEPS * max_batch_tokens, decode_weight)
        self.preemptions = 0
        self.reserved = 0
        """Blocks promised to running sequences that they have not taken yet. At most `manager.available`."""
        self._computing: dict[bytes, Sequence] = {}
        """Hashes of the blocks that running prefills are going to register."""
        self._arrivals = self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new arrival."""
        self._arrivals += 1
        sequence.order = self._arrivals
        self.waiting.add(sequence)
        self.fairness.arrive(sequence.space.salt, sequence.arrived)

    def remove(self, sequence: Sequence, now: float) -> None:
        """Forget a finished or aborted sequence, in whatever state, and give its blocks back."""
        if sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._give_back(sequence, now)
        self.fairness.leave(sequence.space.salt, now)

    def schedule(self, now: float) -> list[Chunk]:
        """The next step's chunks, blocks allocated. Not empty when there is work."""
        self._step += 1
        preempted_before = self.preemptions
        self._make_room(now)
        limits = self._limits(now)
        chunks = self._decode(limits, now)
        # What was just preempted must not come back in the same breath.
        self._prefill(chunks, limits, now, admitting=self.preemptions == preempted_before)
        # The few whose turn it was to decode may all have given way to others, whose turn it was not.
        return chunks or self._decode(None, now)

    def batch(self, chunks: list[Chunk]) -> FlatBatch:
        """The chunks laid end to end as tensors."""
        return flat_batch(chunks, self.table)

    def commit(self, chunks: list[Chunk]) -> None:
        """Record that the step ran: these chunks' KV is in the pool, and blocks they filled can be found by others."""
        for sequence, start, end in chunks:
            if start < sequence.peak_computed:
                sequence.recomputed_tokens += min(end, sequence.peak_computed) - start
            if end > sequence.peak_computed:
                sequence.peak_computed = end
            sequence.computed = end
            if sequence.registered < end // BLOCK_TOKENS and not sequence.collided:
                self._register(sequence)

    def check(self) -> None:
        """Raise AssertionError unless pool, table and queues agree. For tests."""
        self.manager.check([sequence.blocks for sequence in self.running])
        order = [(sequence.priority, sequence.order) for sequence in self.running]
        assert order == sorted(order)
        assert all(not sequence.blocks and sequence.row is None for sequence in self.waiting)
        for line in self.waiting.lines.values():
            assert line and [sequence.order for sequence in line] == sorted(sequence.order for sequence in line)
        for sequence in self.running:
            row = self.table[sequence.row]
            assert row[: len(sequence.blocks)].tolist() == sequence.blocks and not row[len(sequence.blocks) :].any()
            assert blocks_for(sequence.computed) <= len(sequence.blocks)
        assert len(self._free_rows) + len(self.running) == len(self.table)
        assert self.reserved == sum(max(0, s.promised - len(s.blocks)) for s in self.running)
        assert self.reserved <= self.manager.available, "more was promised than there is"
        assert all(owner.row is not None for owner in self._computing.values())
        assert self.waiting.awaited() <= self._computing.keys(), "somebody waits for a block that nobody computes"
        everybody = [*self.running, *self.waiting]
        assert len(everybody) == len(self.running) + len(self.waiting)
        assert {sequence.space.salt for sequence in everybody} == self.fairness.active.keys()
        for name, tenant in self.fairness.active.items():
            running = [sequence for sequence in self.running if sequence.space.salt == name]
            assert tenant.active == sum(sequence.space.salt == name for sequence in everybody)
            assert tenant.running == len(running)
            assert tenant.blocks == sum(sequence.own_blocks for sequence in running)

    # Whose turn it is.

    def _turn(self, rank: Rank) -> tuple[int, float, int, bytes]:
        tenant = self.fairness.active[rank.tenant]
        return rank.priority, tenant.counter, tenant.served, rank.tenant

    def _limits(self, now: float) -> dict[bytes, int] | None:
        """Tokens that each tenant with work may have of this step; None when there is only one about."""
        if not self.fairness.contended(now):
            return None
        best: dict[bytes, int] = {}
        for priority, tenant in {*self.waiting.lines, *map(rank, self.running)}:
            best[tenant] = min(priority, best.get(tenant, priority))
        ahead = self.fairness.ahead(best)
        return {tenant: self.quantum if tenant in ahead else self.max_batch_tokens for tenant in best}

    def _decode(self, limits: dict[bytes, int] | None, now: float) -> list[Chunk]:
        decoding = [sequence for sequence in self.running if len(sequence.tokens) - sequence.computed == 1]
        if limits is not None:
            decoding = self._within(limits, decoding)
        for sequence in decoding:
            while sequence.row is not None and not self._grow(sequence, now):
                # Where blocks are left, they are other tenants' to keep: it would be no use to preempt those.
                own = self.manager.available > self.reserved
                self._preempt(victim_for(sequence, self.running, self.fairness, self._pool, own=own), now)
        chunks = [Chunk(s, s.computed, s.computed + 1) for s in decoding if s.row is not None]
        active, weight = self.fairness.active, self.fairness.decode_weight
        for sequence, start, _ in chunks:
            if start >= sequence.peak_computed:
                active[sequence.space.salt].counter += weight
        return chunks

    def _within(self, limits: dict[bytes, int], decoding: list[Sequence]) -> list[Sequence]:
        """Of these, as many as their tenants may have, those who waited longest first; lowers the limits."""
        chosen = []
        for sequence in sorted(decoding, key=lambda s: s.last_step) if len(decoding) > self.quantum else decoding:
            tenant = sequence.space.salt
            if limits[tenant] > 0:
                limits[tenant] -= 1
                sequence.last_step = self._step
                chosen.append(sequence)
        return chosen

    def _prefill(self, chunks: list[Chunk], limits: dict[bytes, int] | None, now: float, *, admitting: bool) -> None:
        """Deal what is left of the step to running prefills and new ones, by turns; extends `chunks`."""
        budget = self.max_batch_tokens - len(chunks)
        groups: dict[Rank, list[Sequence]] = {}
        for sequence in self.running:
            if len(sequence.tokens) - sequence.computed > 1:
                groups.setdefault(rank(sequence), []).append(sequence)
        for line in self.waiting.lines if admitting else ():
            groups.setdefault(line, [])
        turns = [(self._turn(of), of) for of in groups]
        heapify(turns)
        while turns and budget > 0:
            _, of = heappop(turns)
            allowance = budget if limits is None else min(budget, limits[of.tenant])
            if allowance <= 0:
                continue
            next_one: Sequence | None = groups[of].pop(0) if groups[of] else None
            if next_one is None and admitting:
                next_one, admitting = self._admit(of, now)
            if next_one is None:
                continue
            chunk = Chunk(next_one, next_one.computed, next_one.computed + min(allowance, next_one.remaining))
            chunks.append(chunk)
            self._charge(chunk)
            budget -= chunk.end - chunk.start
            if limits is not None:
                limits[of.tenant] -= chunk.end - chunk.start
            heappush(turns, (self._turn(of), of))

    def _charge(self, chunk: Chunk) -> None:
        tenant = self.fairness.active[chunk.sequence.space.salt]
        tenant.counter += max(0, chunk.end - max(chunk.start, chunk.sequence.peak_computed))
        tenant.served = self._step

    # Starting.

    def _admit(self, of: Rank, now: float) -> tuple[Sequence | None, bool]:
        """Start the first of a line that need not wait for a block. Also says whether others may be tried after it."""
        while line := self.waiting.lines.get(of):
            sequence = line[0]
            fit = self._fit(sequence)
            if fit is None:
                continue
            if fit.missing <= 0 and self._free_rows:
                self._start(sequence, fit, now)
                return sequence, True
            # Others may go first where it is only their own cached blocks that this one must not have.
            kept = self.manager.protected_from(of.tenant) if self.fairness.active[of.tenant].running else 0
            return None, bool(self._free_rows) and fit.missing <= kept
        return None, True

    def _fit(self, sequence: Sequence) -> Fit | None:
        """What starting a waiting sequence takes; None if it was set aside, for another is computing its prefix."""
        length = len(sequence.tokens)
        # At least one token is always computed: its logits are what we are here for.
        reusable = (length - 1) // BLOCK_TOKENS if sequence.reuse else 0
        self.manager.extend_hashes(sequence.hashes, sequence.space, sequence.tokens, length // BLOCK_TOKENS)
        shared = self.manager.match(sequence.hashes[:reusable], sequence.space, sequence.tokens)
        found = coming = len(shared)
        while coming < reusable and self._is_coming(sequence, coming):
            coming += 1
        # A short common beginning is quicker computed twice than waited for.
        if coming > found and 4 * (coming - found) >= reusable - found:
            self.waiting.set_aside(sequence, sequence.hashes[coming - 1])
            return None
        goal = sequence.max_len
        if not sequence.reserves_all:
            goal = min(goal, length + (HEADROOM << min(sequence.preemptions, 20)))
        room = self._room(sequence, others=self.fairness.active[sequence.space.salt].running)
        missing = blocks_for(goal) - found - (room - self.manager.idle_among(shared))
        return Fit(shared, blocks_for(length) - found, blocks_for(goal), missing)

    def _is_coming(self, sequence: Sequence, block: int) -> bool:
        owner = self._computing.get(sequence.hashes[block])
        return owner is not None and owner.priority <= sequence.priority

    def _room(self, sequence: Sequence, others: int) -> int:
        """Blocks this sequence may take that nobody was promised. Its tenant's only one may have all there are."""
        room = self.manager.available - self.reserved
        return room - self.manager.protected_from(sequence.space.salt) if others else room

    def _start(self, sequence: Sequence, fit: Fit, now: float) -> None:
        self.waiting.remove(sequence)
        self.manager.acquire(fit.shared)
        allocated = self.manager.allocate(fit.fresh, sequence.space.salt)
        assert allocated is not None
        sequence.settle_blocks(now)
        sequence.blocks = fit.shared + allocated
        sequence.row = self._free_rows.pop()
        self.table[sequence.row, : len(sequence.blocks)] = sequence.blocks
        sequence.registered = sequence.reused = len(fit.shared)
        sequence.computed = len(fit.shared) * BLOCK_TOKENS
        sequence.promised = fit.promised
        self.reserved += fit.promised - len(sequence.blocks)
        for digest in sequence.hashes[sequence.registered : len(sequence.tokens) // BLOCK_TOKENS]:
            self._computing.setdefault(digest, sequence)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            sequence.peak_computed = sequence.computed
            sequence.admitted = now
        insort(self.running, sequence, key=lambda s: (s.priority, s.order))
        tenant = self.fairness.active[sequence.space.salt]
        tenant.running += 1
        tenant.blocks += fit.promised - sequence.reused

    # Stopping.

    def _make_room(self, now: float) -> None:
        """Where the next to start does not fit, stop those it may displace, and start it."""
        lines = self.waiting.lines
        if not lines or not self.running:
            return
        if len(self.fairness.active) == 1 and self.running[-1].priority <= min(lines).priority:
            return
        sequence = lines[min(lines, key=self._turn)][0]
        fit = self._fit(sequence)
        if fit is None or (fit.missing <= 0 and self._free_rows):
            return
        shortage = Shortage(fit.missing, int(not self._free_rows), fit.promised - len(fit.shared))
        victims = displaced_by(sequence, shortage, self.running, self.fairness, self._pool)
        for victim in victims:
            self._preempt(victim, now)
        if victims and (fit := self._fit(sequence)) is not None and fit.missing <= 0:
            self._start(sequence, fit, now)

    def _grow(self, sequence: Sequence, now: float) -> bool:
        """Have a block for the sequence's next token; False when there is none for it."""
        count = len(sequence.blocks)
        if len(sequence.tokens) <= count * BLOCK_TOKENS:
            return True
        tenant = self.fairness.active[sequence.space.salt]
        if count < sequence.promised:
            self.reserved -= 1
        elif self._room(sequence, others=tenant.running - 1) < 1:
            return False
        else:
            tenant.blocks += 1
        new = self.manager.allocate(1, sequence.space.salt)
        assert new is not None
        sequence.settle_blocks(now)
        sequence.blocks += new
        self.table[sequence.row, count] = new[0]
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        self.running.remove(sequence)
        self._give_back(sequence, now)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.add(sequence)

    def _give_back(self, sequence: Sequence, now: float) -> None:
        sequence.settle_blocks(now)
        self._disown(sequence)
        self.reserved -= max(0, sequence.promised - len(sequence.blocks))
        tenant = self.fairness.active[sequence.space.salt]
        tenant.running -= 1
        tenant.blocks -= sequence.own_blocks
        self.manager.release(sequence.blocks)
        assert sequence.row is not None
        self.table[sequence.row, : len(sequence.blocks)] = 0
        self._free_rows.append(sequence.row)
        sequence.row = None
        sequence.blocks = []
        sequence.computed = sequence.registered = sequence.reused = sequence.promised = 0
        sequence.collided = False

    # Sharing.

    def _register(self, sequence: Sequence) -> None:
        full = sequence.computed // BLOCK_TOKENS
        self.manager.extend_hashes(sequence.hashes, sequence.space, sequence.tokens, full)
        first = sequence.registered
        content = token_bytes(sequence.tokens[first * BLOCK_TOKENS : full * BLOCK_TOKENS])
        for i in range(first, full):
            parent = sequence.blocks[i - 1] if i else ROOT
            tokens = content[(i - first) * BLOCK_BYTES : (i - first + 1) * BLOCK_BYTES]
            digest = sequence.hashes[i]
            block = self.manager.register(sequence.blocks[i], parent, digest, sequence.space, tokens)
            if block is None:
                sequence.collided = True
                self._disown(sequence)
                return
            sequence.blocks[i] = block
            self.table[sequence.row, i] = block
            sequence.registered = i + 1
            if self._computing.pop(digest, None) is not None:
                self.waiting.wake(digest)

    def _disown(self, sequence: Sequence) -> None:
        """The blocks this sequence was going to register will not come: whoever waits for them looks elsewhere."""
        for digest in sequence.hashes[sequence.registered :]:
            if self._computing.get(digest) is sequence:
                del self._computing[digest]
                self.waiting.wake(digest)
