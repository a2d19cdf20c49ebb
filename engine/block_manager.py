"""Paged KV blocks: who holds them, which are cached for reuse, which are free. Knows ids only, never touches KV memory.

A block is in exactly one state: *free* (nothing in it), *held* (one or more sequences refer to it) or *cached* (nobody
does, but its contents may be reused until it is evicted). Full blocks of finished steps are *registered*: found by a
hash that chains over the whole prefix, and confirmed by parent, salt and tokens, so a hash collision costs a miss and
never a wrong answer.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.batch import BLOCK_TOKENS

ROOT = -1
"""Parent of a sequence's first block."""

Digest = Callable[[bytes, bytes, bytes], bytes]


def block_digest(parent: bytes, salt: bytes, tokens: bytes) -> bytes:
    """SHA-256 over parent hash, tenant salt and token ids, each tagged and with its length: none poses as another."""
    digest = hashlib.sha256()
    for tag, field in ((b"P", parent), (b"S", salt), (b"T", tokens)):
        digest.update(tag + len(field).to_bytes(4, "little") + field)
    return digest.digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as 32-bit integers, the form in which blocks are hashed and compared."""
    return array("i", tokens).tobytes()


class _Entry(NamedTuple):
    """What a registered block contains. Its parent stays registered as long as it does (see `release`)."""

    digest: bytes
    parent: int
    salt: bytes
    tokens: bytes


class BlockManager:
    """The pool of one model: `num_blocks` blocks of 16 tokens. Only tests that force collisions replace `digest`."""

    def __init__(self, num_blocks: int, digest: Digest = block_digest) -> None:
        self.num_blocks = num_blocks
        self.digest = digest
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # in order of eviction: dicts keep insertion order
        self._refs = [0] * num_blocks
        self._entries: list[_Entry | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones to evict."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return self.num_blocks - self.available

    def extend_hashes(self, hashes: list[bytes], salt: bytes, tokens: Sequence[int], count: int) -> None:
        """Grow a sequence's chain of block hashes, in place, until it covers its first `count` blocks."""
        for i in range(len(hashes), count):
            parent = hashes[-1] if hashes else b""
            hashes.append(self.digest(parent, salt, token_bytes(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])))

    def match(self, hashes: Sequence[bytes], salt: bytes, tokens: Sequence[int]) -> list[int]:
        """Registered blocks of the longest known prefix of `tokens`, at most `len(hashes)`. Takes no reference."""
        found: list[int] = []
        parent = ROOT
        for i, digest in enumerate(hashes):
            block = self._index.get(digest)
            content = token_bytes(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
            if block is None or self._entries[block] != _Entry(digest, parent, salt, content):
                break
            found.append(block)
            parent = block
        return found

    def can_take(self, shared: Sequence[int], count: int) -> bool:
        """Whether `count` more blocks can be had after `shared` (from `match`) have been acquired."""
        return self.available - sum(not self._refs[block] for block in shared) >= count

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to registered blocks."""
        for block in blocks:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, evicting least recently used ones. None when there are too few."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        entry = self._entries[block]
        assert entry is not None
        del self._index[entry.digest]
        self._entries[block] = None
        return block

    def register(self, block: int, parent: int, digest: bytes, salt: bytes, tokens: bytes) -> int | None:
        """Make a held block, just filled, findable. Returns the block the sequence must use from now on.

        Usually that is `block`. When an equal block is registered already (two requests computed one prefix at the
        same time), it is that one, the reference moves over and `block` is given back: so whoever holds a registered
        block also holds its registered parent. None on a hash collision: this block, and what follows, stay private.
        """
        entry = _Entry(digest, parent, salt, tokens)
        known = self._index.get(digest)
        if known is None:
            self._index[digest] = block
            self._entries[block] = entry
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
            if self._entries[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool adds up, given every live sequence's blocks. For tests."""
        references = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                references[block] += 1
        assert references == self._refs, "reference counts differ from what sequences hold"
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(self._refs) if count}
        assert len(free) == len(self._free) and not free & cached and not free & held and not cached & held
        assert len(free) + len(cached) + len(held) == self.num_blocks, "free + cached + held != total"
        for block, entry in enumerate(self._entries):
            assert (entry is not None) or block not in cached
            if entry is None:
                continue
            assert block not in free and self._index[entry.digest] == block
            assert entry.parent == ROOT or self._entries[entry.parent] is not None, "a registered block lost its parent"
        assert len(self._index) == sum(entry is not None for entry in self._entries)
