"""What blocks a model holds, told to whoever balances requests over several engines: a numbered list of changes.

The block manager notes each change as it happens; everything else is done for who asks, on the step loop between two
steps, so that what is told is what was true at one moment.
"""

import uuid
from collections import deque
from collections.abc import Iterable
from itertools import islice

from engine.protocol import BlockChanges

LEAST_KEPT = 1024


class Published:
    """Changes are kept until `kept` later ones have come: then telling all blocks is shorter."""

    def __init__(self, kept: int) -> None:
        self.instance = uuid.uuid4().hex
        self.sequence = 0
        """Changes so far. May be read from any thread."""
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=max(kept, LEAST_KEPT))

    def added(self, digest: bytes) -> None:
        self.sequence += 1
        self._changes.append((digest, True))

    def removed(self, digest: bytes) -> None:
        self.sequence += 1
        self._changes.append((digest, False))

    def since(self, instance: str, sequence: int, held: Iterable[bytes]) -> BlockChanges:
        """What has changed since then; all blocks, `held`, for who knows another instance or too little of this one."""
        missed = self.sequence - sequence
        if instance != self.instance or not 0 <= missed <= len(self._changes):
            names = [block_name(digest) for digest in held]
            return BlockChanges(instance=self.instance, sequence=self.sequence, reset=True, added=names, removed=[])
        last: dict[bytes, bool] = {}
        for digest, is_there in islice(reversed(self._changes), missed):
            last.setdefault(digest, is_there)
        return BlockChanges(
            instance=self.instance,
            sequence=self.sequence,
            reset=False,
            added=[block_name(digest) for digest, is_there in last.items() if is_there],
            removed=[block_name(digest) for digest, is_there in last.items() if not is_there],
        )


def block_name(digest: bytes) -> str:
    return digest[:8].hex()
