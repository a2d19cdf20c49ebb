"""Paged KV blocks: who holds them, which are cached for reuse, which are free. Knows ids only, never touches KV memory.

A block is in exactly one state: *free* (nothing in it), *held* (one or more sequences refer to it) or *cached* (nobody
does, but its contents may be reused until it is evicted). Full blocks of finished steps are *registered*: found by a
hash that chains over the whole prefix, and confirmed by parent, space and tokens, so a hash collision costs a miss and
never a wrong answer.

Eviction takes the least recently used block of a tenant above its floor: a share of the pool, split evenly among the
tenants that have something cached. One tenant's flood of prompts so displaces its own leftovers, not everybody's.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from engine.batch import BLOCK_TOKENS
from engine.protocol import BlockChanges
from engine.published import Published

ROOT = -1
"""Parent of a sequence's first block."""


class Space(NamedTuple):
    """Whose blocks may be shared: those of one tenant, computed with one adapter (empty: the bare model)."""

    salt: bytes
    adapter: bytes = b""


Digest = Callable[[bytes, Space, bytes], bytes]


def block_digest(parent: bytes, space: Space, tokens: bytes) -> bytes:
    """SHA-256 over parent hash, tenant salt, adapter and token ids, each tagged and with its length: none poses as
    another."""
    return hashlib.sha256(_field(b"P", parent) + _space_fields(space) + _field(b"T", tokens)).digest()


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(4, "little") + value


@lru_cache(maxsize=1024)
def _space_fields(space: Space) -> bytes:
    return _field(b"S", space.salt) + _field(b"A", space.adapter)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as 32-bit integers, the form in which blocks are hashed and compared."""
    return array("i", tokens).tobytes()


BLOCK_BYTES = len(token_bytes([0] * BLOCK_TOKENS))


class _Entry(NamedTuple):
    """What a registered block contains. Its parent stays registered as long as it does (see `release`)."""

    digest: bytes
    parent: int
    space: Space
    tokens: bytes


class BlockManager:
    """The pool of one model: `num_blocks` blocks of 16 tokens. Only tests that force collisions replace `digest`.

    `tenant_floor` is the part of the pool (0 to 1) that the tenants' floors take together.
    """

    def __init__(self, num_blocks: int, digest: Digest = block_digest, tenant_floor: float = 0.0) -> None:
        self.num_blocks = num_blocks
        self.digest = digest
        self.tenant_floor = tenant_floor
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[bytes, dict[int, int]] = {}
        """By tenant, blocks in order of eviction (dicts keep insertion order) with the age that orders them all."""
        self._num_cached = self._age = 0
        self._protected: int | None = 0  # None: to be counted anew
        self._refs = [0] * num_blocks
        self._entries: list[_Entry | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self.published = Published(kept=2 * num_blocks)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return self._num_cached

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones to evict."""
        return len(self._free) + self._num_cached

    @property
    def held(self) -> int:
        return self.num_blocks - self.available

    @property
    def floor(self) -> int:
        """Cached blocks that each tenant keeps whatever the others do."""
        return int(self.tenant_floor * self.num_blocks / max(1, len(self._cached)))

    def cached_of(self, tenant: bytes) -> int:
        """Blocks cached for a tenant."""
        return len(self._cached.get(tenant, ()))

    def protected_from(self, tenant: bytes) -> int:
        """Cached blocks that are other tenants' floors: `available`, but not for this tenant to take."""
        if not self.tenant_floor:
            return 0
        floor = self.floor
        if self._protected is None:
            self._protected = sum(min(len(blocks), floor) for blocks in self._cached.values())
        return self._protected - min(self.cached_of(tenant), floor)

    def extend_hashes(self, hashes: list[bytes], space: Space, tokens: Sequence[int], count: int) -> None:
        """Grow a sequence's chain of block hashes, in place, until it covers its first `count` blocks."""
        known = len(hashes)
        if known >= count:
            return
        content = token_bytes(tokens[known * BLOCK_TOKENS : count * BLOCK_TOKENS])
        parent = hashes[-1] if hashes else b""
        for at in range(0, len(content), BLOCK_BYTES):
            parent = self.digest(parent, space, content[at : at + BLOCK_BYTES])
            hashes.append(parent)

    def match(self, hashes: Sequence[bytes], space: Space, tokens: Sequence[int]) -> list[int]:
        """Registered blocks of the longest known prefix of `tokens`, at most `len(hashes)`. Takes no reference."""
        found: list[int] = []
        if not hashes or hashes[0] not in self._index:
            return found
        content = token_bytes(tokens[: len(hashes) * BLOCK_TOKENS])
        parent = ROOT
        for i, digest in enumerate(hashes):
            block = self._index.get(digest)
            entry = (digest, parent, space, content[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])
            if block is None or self._entries[block] != entry:
                break
            found.append(block)
            parent = block
        return found

    def changes_since(self, instance: str, sequence: int) -> BlockChanges:
        """Which blocks were registered and evicted since then, as `Published.since` tells it."""
        return self.published.since(instance, sequence, self._index)

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of these registered blocks nobody holds: acquiring them lowers `available` by so many."""
        return sum(not self._refs[block] for block in blocks)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to registered blocks."""
        for block in blocks:
            if not self._refs[block]:
                self._forget_cached(block)
            self._refs[block] += 1

    def allocate(self, count: int, tenant: bytes) -> list[int] | None:
        """`count` blocks with one reference each, evicting cached ones. None when there are too few."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict(tenant)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self, tenant: bytes) -> int:
        """Above the floors the least recently used block goes first; then the tenant's own; floors only at last."""
        floor = self.floor
        above = [blocks for blocks in self._cached.values() if len(blocks) > floor]
        own = [self._cached[tenant]] if tenant in self._cached else []
        choice = min(above or own or self._cached.values(), key=lambda blocks: next(iter(blocks.values())))
        block = next(iter(choice))
        self._forget_cached(block)
        entry = self._entries[block]
        assert entry is not None
        del self._index[entry.digest]
        self.published.removed(entry.digest)
        self._entries[block] = None
        return block

    def _forget_cached(self, block: int) -> None:
        entry = self._entries[block]
        assert entry is not None
        blocks = self._cached[entry.space.salt]
        del blocks[block]
        if not blocks:
            del self._cached[entry.space.salt]
        self._num_cached -= 1
        self._protected = None

    def register(self, block: int, parent: int, digest: bytes, space: Space, tokens: bytes) -> int | None:
        """Make a held block, just filled, findable. Returns the block the sequence must use from now on.

        Usually that is `block`. When an equal block is registered already (two requests computed one prefix at the
        same time), it is that one, the reference moves over and `block` is given back: so whoever holds a registered
        block also holds its registered parent. None on a hash collision: this block, and what follows, stay private.
        """
        entry = _Entry(digest, parent, space, tokens)
        known = self._index.get(digest)
        if known is None:
            self._index[digest] = block
            self._entries[block] = entry
            self.published.added(digest)
            return block
        if self._entries[known] != entry:
            return None
        if known != block:
            self.acquire([known])
            self.release([block])
        return known

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each of a sequence's blocks, given in order.

        The tail goes first, so it is evicted before the head, and a child is always evicted before its parent.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            entry = self._entries[block]
            if entry is None:
                self._free.append(block)
            else:
                self._age += 1
                self._cached.setdefault(entry.space.salt, {})[block] = self._age
                self._num_cached += 1
                self._protected = None

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool adds up, given every live sequence's blocks. For tests."""
        references = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                references[block] += 1
        assert references == self._refs, "reference counts differ from what sequences hold"
        free, cached = set(self._free), {block for blocks in self._cached.values() for block in blocks}
        held = {block for block, count in enumerate(self._refs) if count}
        assert len(free) == len(self._free) and not free & cached and not free & held and not cached & held
        assert len(free) + len(cached) + len(held) == self.num_blocks, "free + cached + held != total"
        assert len(cached) == self._num_cached and all(self._cached.values())
        for tenant, blocks_of_tenant in self._cached.items():
            ages = list(blocks_of_tenant.values())
            assert ages == sorted(ages) and ages[-1] <= self._age
            for block in blocks_of_tenant:
                entry = self._entries[block]
                assert entry is not None and entry.space.salt == tenant, "cached under another tenant's name"
        for block, entry in enumerate(self._entries):
            if entry is None:
                continue
            assert block not in free and self._index[entry.digest] == block
            assert entry.parent == ROOT or self._entries[entry.parent] is not None, "a registered block lost its parent"
        assert len(self._index) == sum(entry is not None for entry in self._entries)
