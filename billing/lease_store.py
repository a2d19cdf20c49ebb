"""The leases of one replica in PostgreSQL. Windows are always locked in the order of their keys, so nobody deadlocks.

A replica's statements about its own leases are made one after another, by one task; an advisory lock makes that hold
also for a statement whose connection broke before anyone knew what became of it.
"""

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import allowances, captures, rollover
from billing.allowances import CHANNEL, Allowance, Scope
from billing.grants import Demand, Rest, Wish, grants
from billing.lease_pool import Gift, Taken
from billing.notices import notify
from billing.pots import EXACT, Key, Pot
from billing.settlements import free_lost
from billing.windows import window_bounds, zone

SLICES = 16
"""A lease is filled up to this part of what is left in the window, so leases shrink as the window empties."""

_TURN = text("""
    SELECT clock_timestamp() AS now, pg_advisory_xact_lock(hashtextextended(:replica, 0)),
        (SELECT freed_at FROM replica WHERE name = :replica) AS freed_at
""")
_NOW = text("SELECT clock_timestamp()")
# Makes windows that are new, and locks all: in two statements, a new one would be locked before its turn.
_OPEN = text("""
    INSERT INTO budget_window AS w (budget_id, starts_at)
    SELECT b.id, k.starts_at
    FROM unnest(CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[])) AS k (id, starts_at) JOIN budget b USING (id)
    ORDER BY b.id, k.starts_at
    ON CONFLICT (budget_id, starts_at) DO UPDATE SET leased = w.leased
""")
_LOCK = text("""
    SELECT 1 FROM budget_window w
    JOIN unnest(CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[])) AS k (budget_id, starts_at)
        USING (budget_id, starts_at)
    ORDER BY budget_id, starts_at FOR UPDATE OF w
""")
# A statement of its own, after the lock: it sees the limit and the window as they are under it.
_REST = text("""
    SELECT budget_id, rest, trunc(rest / :slices, CASE unit WHEN 'money' THEN 9 ELSE 0 END) AS slice FROM (
        SELECT b.id AS budget_id, b.unit, greatest(b.limit_amount + w.added - w.settled - w.leased, 0) AS rest
        FROM budget_window w JOIN budget b ON b.id = w.budget_id JOIN unnest(
            CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[]), CAST(:rolls AS boolean[])
        ) AS k (budget_id, starts_at, rolls) USING (budget_id, starts_at)
        WHERE k.rolls = (b.rolls_since IS NOT NULL)
    ) AS found
""")
_TAKE = text("""
    WITH grants AS (
        SELECT w.budget_id, w.starts_at, w.leased, k.taken
        FROM budget_window w JOIN unnest(
            CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[]), CAST(:taken AS numeric[])
        ) AS k (budget_id, starts_at, taken) USING (budget_id, starts_at)
    ), moved AS (
        UPDATE budget_window w SET leased = w.leased + g.taken
        FROM grants g WHERE w.budget_id = g.budget_id AND w.starts_at = g.starts_at AND g.taken > 0
    ), leases AS (
        INSERT INTO lease AS l (budget_id, starts_at, replica, granted)
        SELECT budget_id, starts_at, :replica, taken FROM grants WHERE taken > 0
        ON CONFLICT (budget_id, starts_at, replica)
            DO UPDATE SET granted = l.granted + excluded.granted
        RETURNING budget_id, starts_at
    )
    SELECT g.budget_id, g.starts_at, g.taken,
        coalesce(l.granted, 0) + g.taken AS granted,
        g.leased - coalesce(l.granted - l.settled, 0) AS others
    FROM grants g
    LEFT JOIN lease l ON l.budget_id = g.budget_id AND l.starts_at = g.starts_at AND l.replica = :replica
""")
_GIVE = text("""
    WITH given AS (
        UPDATE lease l SET granted = l.granted - k.amount
        FROM unnest(CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[]), CAST(:amounts AS numeric[]))
            AS k (budget_id, starts_at, amount)
        WHERE l.budget_id = k.budget_id AND l.starts_at = k.starts_at AND l.replica = :replica
        RETURNING l.budget_id, l.starts_at, k.amount
    )
    UPDATE budget_window w SET leased = w.leased - g.amount
    FROM given g WHERE w.budget_id = g.budget_id AND w.starts_at = g.starts_at
""")
_GRANTED = text("""
    SELECT budget_id, starts_at, granted FROM lease WHERE replica = :replica AND budget_id = ANY(:budgets)
""")
_LOOK = text("""
    SELECT w.budget_id, w.starts_at, b.limit_amount + w.added - w.settled - w.leased AS rest,
        w.leased - coalesce(l.granted - l.settled, 0) AS others
    FROM budget_window w
    JOIN unnest(CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[])) AS k (budget_id, starts_at)
        USING (budget_id, starts_at)
    JOIN budget b ON b.id = w.budget_id
    LEFT JOIN lease l ON l.budget_id = w.budget_id AND l.starts_at = w.starts_at AND l.replica = :replica
""")
_FREED = text("SELECT freed_at FROM replica WHERE name = :replica FOR UPDATE")
_RENEW = text("""
    INSERT INTO replica (name) VALUES (:replica) ON CONFLICT (name) DO UPDATE SET renewed_at = now(), freed_at = NULL
""")
_FINISHED = text("""
    DELETE FROM lease l
    USING unnest(CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[])) AS k (budget_id, starts_at)
    WHERE l.budget_id = k.budget_id AND l.starts_at = k.starts_at
        AND l.replica = :replica AND l.granted = l.settled
    RETURNING l.budget_id, l.starts_at
""")
_OLD_MINUTES = text("""
    DELETE FROM budget_window WHERE (budget_id, starts_at) IN (
        SELECT w.budget_id, w.starts_at FROM budget_window w JOIN budget b ON b.id = w.budget_id
        WHERE b."window" = 'minute' AND w.starts_at < now() - interval '2 hours'
        FOR UPDATE OF w SKIP LOCKED
    )
""")
"""Not at once: a clock that goes back an hour must not find a minute unused again."""


class TakenForDeadError(Exception):
    """This replica's leases were freed while it could not be heard: it has to look what it still has (`renew`)."""


class Store:
    """Every method is one transaction, and raises the database's errors as they come."""

    def __init__(self, engine: AsyncEngine, replica: str) -> None:
        self._engine = engine
        self._replica = replica

    async def find(self, scopes: Sequence[Scope]) -> tuple[datetime, float, list[Allowance]]:
        """The database's time, the monotonic time then, and the allowances of these scopes."""
        async with self._engine.connect() as conn:
            moment, found = await allowances.find(conn, scopes)
            return moment, time.monotonic(), found

    async def take(self, demands: Sequence[Demand], wishes: Sequence[Wish]) -> tuple[datetime, float, list[Taken]]:
        """Lease what is asked for, in the windows of the database's time; return that, and the monotonic time then.

        A call's wish is granted as a whole or not at all (`billing.grants`): the windows are locked together.
        """
        rolling = [d.terms.id for d in demands if d.terms.rolls_since is not None]
        wallets = [d.terms.id for d in demands if d.terms.prepaid]
        async with self._turn() as (conn, moment):
            latest = {}
            if rolling:
                latest = await rollover.lock(conn, rolling)
                moment = (await conn.execute(_NOW)).scalar_one()  # there may have been a wait
            now = time.monotonic()
            moments = [max(moment, latest.get(d.terms.id, moment)) for d in demands]
            bounds = [
                window_bounds(at, d.terms.window, zone(d.terms.time_zone))
                for d, at in zip(demands, moments, strict=True)
            ]
            starts = {d.terms.id: start for d, (start, _) in zip(demands, bounds, strict=True)}
            ends = {d.terms.id: end for d, (_, end) in zip(demands, bounds, strict=True)}
            keys = {"budgets": list(starts), "starts": list(starts.values())}
            await conn.execute(_OPEN, keys)
            if rolling:
                await rollover.carry(conn, {budget_id: starts[budget_id] for budget_id in rolling})
            if wallets:
                ends |= await captures.expire(conn, wallets, moment)
            rolls = {"rolls": [d.terms.rolls_since is not None for d in demands], "slices": SLICES}
            rows = await conn.execute(_REST, keys | rolls)
            rests = {row.budget_id: Rest(row.rest, row.slice) for row in rows}
            taken = grants(demands, wishes, rests)
            amounts = {
                "budgets": list(taken),
                "starts": [starts[budget_id] for budget_id in taken],
                "taken": list(taken.values()),
            }
            rows = await conn.execute(_TAKE, amounts | {"replica": self._replica})
            return moment, now, [_taken(row, ends, rests) for row in rows]

    async def give(self, gifts: Sequence[Gift]) -> None:
        """Give back, and tell replicas that may wait for it."""
        async with self._turn() as (conn, _):
            keys = _keys(gift.key for gift in gifts)
            await conn.execute(_LOCK, keys)
            await conn.execute(_GIVE, keys | {"amounts": [g.amount for g in gifts], "replica": self._replica})
            for budget_id in {gift.key[0] for gift in gifts}:
                await notify(conn, CHANNEL, f"gave {self._replica} {budget_id}")

    async def ask(self, budget_ids: Iterable[UUID]) -> None:
        """Ask other replicas to give back what they have free."""
        async with self._engine.begin() as conn:
            for budget_id in budget_ids:
                await notify(conn, CHANNEL, f"want {self._replica} {budget_id}")

    async def granted(self, budget_ids: Sequence[UUID]) -> dict[Key, Decimal]:
        """The leases of these, once whatever was under way about them is over."""
        async with self._turn() as (conn, _):
            rows = await conn.execute(_GRANTED, {"replica": self._replica, "budgets": list(budget_ids)})
            return {(row.budget_id, row.starts_at): row.granted for row in rows}

    async def look(self, keys: Iterable[Key]) -> dict[Key, tuple[Decimal, Decimal]]:
        """What nobody has taken out of these windows, and what others have."""
        async with self._engine.connect() as conn:
            rows = await conn.execute(_LOOK, _keys(keys) | {"replica": self._replica})
            return {(row.budget_id, row.starts_at): (row.rest, row.others) for row in rows}

    async def renew(self) -> bool:
        """Say that this replica is alive; return whether it was taken for dead and its leases were freed."""
        async with self._engine.begin() as conn:
            freed_at = (await conn.execute(_FREED, {"replica": self._replica})).scalar_one_or_none()
            await conn.execute(_RENEW, {"replica": self._replica})
        return freed_at is not None

    async def free_lost(self, seconds: float) -> None:
        """Free the calls at once of replicas that have not said for so long that they are alive."""
        async with self._engine.begin() as conn:
            await free_lost(conn, seconds)

    async def tidy(self, finished: Sequence[Pot]) -> list[Pot]:
        """Delete what is over, of this replica's leases and of minutes; return the pots whose rows are gone."""
        async with self._engine.begin() as conn:
            rows = await conn.execute(_FINISHED, _keys(pot.key for pot in finished) | {"replica": self._replica})
            gone = {(row.budget_id, row.starts_at) for row in rows}
        async with self._engine.begin() as conn:
            await conn.execute(_OLD_MINUTES)
        return [pot for pot in finished if pot.key in gone or not pot.granted]

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[tuple[AsyncConnection, datetime]]:
        async with self._engine.begin() as conn:
            row = (await conn.execute(_TURN, {"replica": self._replica})).one()
            if row.freed_at is not None:
                raise TakenForDeadError
            yield conn, row.now


def _keys(keys: Iterable[Key]) -> dict[str, list[object]]:
    pairs = list(keys)
    return {"budgets": [budget_id for budget_id, _ in pairs], "starts": [starts_at for _, starts_at in pairs]}


def _taken(row: Row[Any], ends: Mapping[UUID, datetime | None], rests: Mapping[UUID, Rest]) -> Taken:
    return Taken(
        key=(row.budget_id, row.starts_at),
        ends_at=ends[row.budget_id],
        taken=row.taken,
        granted=row.granted,
        left=EXACT.subtract(rests[row.budget_id].rest, row.taken),
        others=row.others,
    )
