"""Sequences that have not been admitted: a line for each tenant and priority, and those who wait for a block.

Aside from the lines stand sequences whose prefix another one is computing this moment. They come back when that block
can be found in the cache, or will not be: so a prefix that many ask for at once is computed once, and a queue of
hundreds is not looked through in every step.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from engine.sequence import Sequence


class Rank(NamedTuple):
    """Sequences of one tenant and priority, who are served in order of arrival. A lower priority goes first."""

    priority: int
    tenant: bytes


def rank(sequence: Sequence) -> Rank:
    return Rank(sequence.priority, sequence.space.salt)


def _order(sequence: Sequence) -> int:
    return sequence.order


class Waiting:
    """All of a scheduler's sequences without blocks."""

    def __init__(self) -> None:
        self.lines: dict[Rank, list[Sequence]] = {}
        """Those that can be tried now. No line is empty."""
        self._aside: dict[bytes, list[Sequence]] = {}
        self._wants: dict[Sequence, bytes] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for line in self.lines.values():
            yield from line
        yield from self._wants

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at its place in its line."""
        insort(self.lines.setdefault(rank(sequence), []), sequence, key=_order)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        digest = self._wants.pop(sequence, None)
        if digest is None:
            line = self.lines[rank(sequence)]
            del line[bisect_left(line, sequence.order, key=_order)]
            if not line:
                del self.lines[rank(sequence)]
        else:
            self._aside[digest].remove(sequence)
            if not self._aside[digest]:
                del self._aside[digest]
        self._count -= 1

    def set_aside(self, sequence: Sequence, digest: bytes) -> None:
        """Let a sequence wait until the block with this hash is registered, or given up."""
        self.remove(sequence)
        self._count += 1
        self._aside.setdefault(digest, []).append(sequence)
        self._wants[sequence] = digest

    def wake(self, digest: bytes) -> None:
        """Bring back to their lines those who waited for this block."""
        for sequence in self._aside.pop(digest, ()):
            del self._wants[sequence]
            self._count -= 1
            self.add(sequence)

    def awaited(self) -> set[bytes]:
        """Hashes of the blocks that somebody waits for."""
        assert set(self._wants.values()) == set(self._aside)
        return set(self._aside)
