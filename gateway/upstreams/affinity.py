"""Who holds the longest prefix of a prompt.

An engine of ours publishes the blocks it holds (`GET /v1/blocks`), and a follower keeps up with it; the prompt's own
block hashes come from its `/tokenize`. Of other upstreams only what was sent to them is known: chunks of the prompt's
JSON, hashed in a chain, so that a chunk is equal only where all before it are.
"""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec

from engine.protocol import BlockChanges
from gateway.call import Call
from gateway.upstreams.transport import BrokenError, UnreachableError
from gateway.upstreams.upstream import Upstream

CHUNK_BYTES = 256
MOST_CHUNKS = 4096
"""Of a prompt: beyond the first megabyte it does not matter who holds more."""
REMEMBERED_CHUNKS = 100_000
"""Of one upstream: about 25 MB of prompts."""
POLL_SECONDS = 5.0
"""An engine that stops waits for the open question to end, so it is a short one."""
RETRY_SECONDS = 1.0

T = TypeVar("T")


def text_chain(call: Call) -> list[int]:
    """Hashes of the prompt's full chunks, tools first as templates have it, each over all before it."""
    names = ("tools", "messages", "prompt")
    text = b"".join(bytes(call.fields[name]) for name in names if name in call.fields)
    chain: list[int] = []
    parent = 0
    for at in range(0, min(len(text), CHUNK_BYTES * MOST_CHUNKS) - CHUNK_BYTES + 1, CHUNK_BYTES):
        parent = hash((parent, text[at : at + CHUNK_BYTES]))
        chain.append(parent)
    return chain


def matched(chain: Sequence[T], held: Collection[T]) -> int:
    """How many of the chain's first hashes are held: those after a gap are of no use."""
    for index, item in enumerate(chain):
        if item not in held:
            return index
    return len(chain)


class SentChunks:
    """What one upstream was sent, the least recently sent forgotten first."""

    def __init__(self, most: int = REMEMBERED_CHUNKS) -> None:
        self._most = most
        self._sent: dict[int, None] = {}

    def matched(self, chain: Sequence[int]) -> int:
        return matched(chain, self._sent)

    def add(self, chain: Sequence[int]) -> None:
        """The tail goes in first, so it is forgotten before the head, and a chunk before those it follows."""
        for item in reversed(chain):
            self._sent.pop(item, None)
            self._sent[item] = None
        while len(self._sent) > self._most:
            del self._sent[next(iter(self._sent))]


class BlockFollower:
    """Keeps up with the blocks that an engine holds for one model. `held` is empty while nothing is known."""

    def __init__(self, upstream: Upstream, model: str) -> None:
        self._upstream = upstream
        self._model = model
        self._instance = ""
        self._sequence = 0
        self._task: asyncio.Task[None] | None = None
        self.held: set[str] = set()

    def start(self) -> None:
        """Begin to follow, if it has not begun."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            changes: BlockChanges | None = None
            with contextlib.suppress(UnreachableError, BrokenError, msgspec.MsgspecError):
                wait = min(POLL_SECONDS, self._upstream.settings.first_byte_seconds / 2)
                changes = await self._upstream.block_changes(self._model, self._instance, self._sequence, wait)
            if changes is None:  # it is away, or restarts and will hold nothing
                self.held.clear()
                self._instance = ""
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self.apply(changes)

    def apply(self, changes: BlockChanges) -> None:
        if changes.reset:
            self.held.clear()
        self.held.difference_update(changes.removed)
        self.held.update(changes.added)
        self._instance, self._sequence = changes.instance, changes.sequence
