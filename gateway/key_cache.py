"""Whom a key's hash speaks for, as this process knows it: in memory, kept true by the database's notices.

What is known is answered without the database until a notice says that it changed. What is not is asked in batches, one
query at a time, which takes along what came meanwhile: thousands of wrong keys a second are a few queries. While the
database is away, what is known goes on being answered and nothing else is.
"""

import asyncio
import time
from dataclasses import dataclass
from itertools import islice
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.notices import Notices
from billing.people import KEYS_CHANNEL, Principal, find_keys
from gateway.database import reachable
from gateway.errors import ApiError, unavailable

FRESH_SECONDS = 0.7
"""How long an answer of the database is good without notices. With PATIENCE_SECONDS, a revocation's longest way."""
HEARD_SECONDS = 60.0
"""How long with notices: they tell every change made through `billing`, but not one by an operator's own SQL."""
PATIENCE_SECONDS = 0.3
"""How long a known key waits for a slow database before it is answered as known."""
WRONG_SECONDS = 5.0

BATCH = 1000
"""Hashes in one query."""
PAUSE_SECONDS = 0.05
"""After a query that failed."""

KNOWN_ENTRIES = 100_000
WRONG_ENTRIES = 10_000
WAITING_ENTRIES = 50_000

log = structlog.get_logger()


@dataclass(slots=True)
class _Known:
    principal: Principal
    read_at: float
    """When its query began, by time.monotonic()."""


class KeyCache:
    """One a process. Wrong keys have a memory of their own: however many come, they push out no good one."""

    def __init__(self, engine: AsyncEngine, notices: Notices) -> None:
        self._engine = engine
        self._notices = notices
        self._known: dict[bytes, _Known] = {}
        self._hashes: dict[UUID, set[bytes]] = {}
        """Of what is known, by key."""
        self._wrong: dict[bytes, float] = {}
        self._waiting: dict[bytes, asyncio.Future[tuple[bool, Principal | None]]] = {}
        """Asked and not answered yet: (whether the database answered, what)."""
        self._reading: asyncio.Task[None] | None = None
        self._began: float | None = None
        """When the query under way did."""
        self._away = False
        """Whether the last query failed."""
        self._changed: set[UUID] = set()
        """Keys that changed since the query under way began."""
        self._missed = False
        """Whether any key may have."""
        notices.subscribe(KEYS_CHANNEL, self._notice)

    def known(self, digest: bytes) -> Principal | None:
        """What needs no asking, at once."""
        known = self._known.get(digest)
        if known is None:
            return None
        age = time.monotonic() - known.read_at
        if age < FRESH_SECONDS or (age < HEARD_SECONDS and self._notices.healthy):
            return known.principal
        return None

    async def find(self, digest: bytes) -> Principal | None:
        """What the database says, or said last while it is away; None: there is no such key. Raises ApiError 503."""
        if digest not in self._known:
            if time.monotonic() - self._wrong.get(digest, float("-inf")) < WRONG_SECONDS:
                return None
            answered, principal = await self._ask(digest)
            if not answered:
                raise _away()
            return principal
        slow = self._began is not None and time.monotonic() - self._began > PATIENCE_SECONDS
        try:
            async with asyncio.timeout(0 if self._away or slow else PATIENCE_SECONDS):
                answered, principal = await self._ask(digest)
            if answered:
                return principal
        except TimeoutError:
            pass
        known = self._known.get(digest)
        if known is None:  # it has changed meanwhile
            raise _away()
        return known.principal

    async def _ask(self, digest: bytes) -> tuple[bool, Principal | None]:
        waiter = self._waiting.get(digest)
        if waiter is None:
            if len(self._waiting) >= WAITING_ENTRIES:
                return False, None
            waiter = self._waiting[digest] = asyncio.get_running_loop().create_future()
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(waiter)

    async def _read(self) -> None:
        """Answer who waits, a batch at a time, until nobody does."""
        while self._waiting:
            batch = list(islice(self._waiting, BATCH))
            self._changed.clear()
            self._missed = False
            began = self._began = time.monotonic()
            try:
                async with reachable(), self._engine.connect() as connection:
                    found = await find_keys(connection, batch)
            except Exception as error:  # nobody is told that a key is wrong while nobody can know
                if not isinstance(error, ApiError):
                    log.error("keys could not be looked up", reason=type(error).__name__, exc_info=error)
                self._away = True
                for digest in list(self._waiting):
                    self._answer(digest, False, None)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            finally:
                self._began = None
            self._away = False
            for digest in batch:
                principal = found.get(digest)
                if self._missed or (principal is not None and principal.key_id in self._changed):
                    continue  # it may have changed after it was read: read it again
                self._learn(digest, principal, began)
                self._answer(digest, True, principal)

    def _answer(self, digest: bytes, answered: bool, principal: Principal | None) -> None:
        waiter = self._waiting.pop(digest)
        if not waiter.done():
            waiter.set_result((answered, principal))

    def _learn(self, digest: bytes, principal: Principal | None, read_at: float) -> None:
        self._forget(digest)
        if principal is None:
            if len(self._wrong) >= WRONG_ENTRIES:
                self._wrong.clear()
            self._wrong[digest] = read_at
            return
        if len(self._known) >= KNOWN_ENTRIES:
            self._forget(next(iter(self._known)))
        self._known[digest] = _Known(principal, read_at)
        self._hashes.setdefault(principal.key_id, set()).add(digest)

    def _forget(self, digest: bytes) -> None:
        known = self._known.pop(digest, None)
        if known is None:
            return
        hashes = self._hashes[known.principal.key_id]
        hashes.discard(digest)
        if not hashes:
            del self._hashes[known.principal.key_id]

    def _notice(self, payload: str | None) -> None:
        if payload is None:
            self._missed = True
            for known in self._known.values():
                known.read_at = float("-inf")
            return
        key_id = UUID(payload)
        self._changed.add(key_id)
        for digest in list(self._hashes.get(key_id, ())):
            self._forget(digest)


def _away() -> ApiError:
    return unavailable("The ledger's database is away, so the key cannot be checked.")
