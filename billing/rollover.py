"""Rollover: what is left of a window adds to the next one, as far as a cap allows.

It is not kept as a running sum, which a call that is settled late would make wrong: whenever a window is opened, or
leased from, it is computed from the windows before it, as they are by then. In those, what is leased counts as spent
until it is settled or given back. So the sum of all windows is never over, and what comes back is there to be used.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.pots import NOTHING, SUM
from billing.windows import Window, windows_between, zone

# Before a window of such a budget is chosen: who opens the next one and who still takes from the last take turns, so
# nothing is taken from a window after its rest was carried on.
_LOCK = text("""
    SELECT pg_advisory_xact_lock(hashtextextended('rollover ' || k.id, 0))
    FROM (SELECT id FROM unnest(CAST(:budgets AS uuid[])) AS u (id) ORDER BY id) AS k
""")
_LATEST = text("""
    SELECT w.budget_id, max(w.starts_at) AS starts_at
    FROM budget_window w JOIN budget b ON b.id = w.budget_id
    WHERE w.budget_id = ANY(:budgets) AND w.starts_at >= b.rolls_since AND w.limit_amount IS NOT NULL
    GROUP BY w.budget_id
""")
_PAST = text("""
    SELECT w.budget_id, w.starts_at, w.added, w.limit_amount, w.settled + w.leased AS used,
        b."window" AS period, b.time_zone, b.rollover_cap AS cap
    FROM unnest(CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[])) AS k (id, starts_at)
    JOIN budget b ON b.id = k.id AND b.rolls_since IS NOT NULL
    JOIN budget_window w ON w.budget_id = b.id AND w.starts_at >= b.rolls_since AND w.starts_at < k.starts_at
    ORDER BY w.budget_id, w.starts_at
""")
_SET = text("""
    UPDATE budget_window w SET added = k.added, limit_amount = b.limit_amount
    FROM unnest(CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[]), CAST(:added AS numeric[]))
        AS k (id, starts_at, added) JOIN budget b ON b.id = k.id AND b.rolls_since IS NOT NULL
    WHERE w.budget_id = k.id AND w.starts_at = k.starts_at
""")


_OPEN = text("""
    INSERT INTO budget_window (budget_id, starts_at) VALUES (:budget, :starts_at)
    ON CONFLICT (budget_id, starts_at) DO NOTHING
""")
_END = text("""
    UPDATE budget_window SET added = 0, limit_amount = NULL
    WHERE budget_id = :budget AND starts_at >= :starts_at AND limit_amount IS NOT NULL
""")


class Past(NamedTuple):
    """A window that is over."""

    starts_at: datetime
    added: Decimal
    """What had been carried into it; read of the first one only."""
    limit: Decimal | None
    """Its limit; None: that of the one before."""
    used: Decimal


async def lock(conn: AsyncConnection, budgets: Iterable[UUID]) -> dict[UUID, datetime]:
    """Have these budgets' windows to oneself until the transaction ends; return when the latest ones opened start.

    A clock that goes back must not take from a window whose rest was carried on: the latest one is the one of now.
    """
    ids = {"budgets": sorted(budgets)}
    await conn.execute(_LOCK, ids)
    return {row.budget_id: row.starts_at for row in await conn.execute(_LATEST, ids)}


async def change(conn: AsyncConnection, budget_id: UUID, starts_at: datetime, rolls: bool) -> None:
    """The budget was set, and whether it rolls over; this is its window of now.

    The window keeps its limit, for the day when another one is set: what is left of a window is left of its own limit.
    """
    if rolls:
        latest = await lock(conn, [budget_id])
        starts_at = max(starts_at, latest.get(budget_id, starts_at))
        await conn.execute(_OPEN, {"budget": budget_id, "starts_at": starts_at})
        await carry(conn, {budget_id: starts_at})
    else:
        await conn.execute(_END, {"budget": budget_id, "starts_at": starts_at})


async def carry(conn: AsyncConnection, starts: Mapping[UUID, datetime]) -> None:
    """Write what rolls over into these windows, which are locked and whose budgets are (`lock`)."""
    added = await rolled_over(conn, starts)
    amounts = [added.get(budget_id, NOTHING) for budget_id in starts]
    await conn.execute(_SET, {"budgets": list(starts), "starts": list(starts.values()), "added": amounts})


async def rolled_over(conn: AsyncConnection, starts: Mapping[UUID, datetime]) -> dict[UUID, Decimal]:
    """What rolls over into the windows that start then, as of now; nothing where a budget does not roll over."""
    if not starts:
        return {}
    past: dict[UUID, list[Past]] = {}
    terms: dict[UUID, tuple[Window, str, Decimal | None]] = {}
    for row in await conn.execute(_PAST, {"budgets": list(starts), "starts": list(starts.values())}):
        past.setdefault(row.budget_id, []).append(Past(row.starts_at, row.added, row.limit_amount, row.used))
        terms[row.budget_id] = (row.period, row.time_zone, row.cap)
    return {budget_id: carried(windows, starts[budget_id], *terms[budget_id]) for budget_id, windows in past.items()}


def carried(past: Sequence[Past], start: datetime, window: Window, time_zone: str, cap: Decimal | None) -> Decimal:
    """What the window that begins at `start` gets from those before it, the oldest first; unused ones may be missing.

    The first one is where rollover began, or the oldest that is kept; the cap is the one of now, for all of them.
    """
    if not past:
        return NOTHING
    tz = zone(time_zone)
    amount, limit = past[0].added, past[0].limit or NOTHING
    for number, over in enumerate(past):
        following = past[number + 1].starts_at if number + 1 < len(past) else start
        limit = limit if over.limit is None else over.limit
        rest = SUM.subtract(SUM.add(limit, amount), over.used)
        amount = _capped(max(rest, NOTHING), cap)
        if unused := windows_between(over.starts_at, following, window, tz) - 1:
            amount = _capped(SUM.add(amount, SUM.multiply(limit, Decimal(unused))), cap)
    return amount


def _capped(amount: Decimal, cap: Decimal | None) -> Decimal:
    return amount if cap is None else min(amount, cap)
