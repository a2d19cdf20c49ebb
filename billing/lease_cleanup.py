"""Old windows: what nobody will ask for again is deleted, so that tables stay as small as what is used.

The ledger keeps what was spent. Leases go with their windows; those of processes that died do so before
(`billing.settlements`).
"""

from datetime import timedelta
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import rollover

KEEP = timedelta(days=400)
"""How long a window of a day, a week or a month is kept."""
KEEP_HOURS = timedelta(days=35)
"""Likewise of an hour: what rolls over is computed from all that are kept."""
KEEP_REPLICA = timedelta(days=7)
"""A process without leases that was not heard of for so long is forgotten."""

_IS_OLD = """
    b."window" IN ('hour', 'day', 'week', 'month') AND w.leased = 0
    AND w.starts_at < now() - CASE b."window" WHEN 'hour' THEN CAST(:hours AS interval) ELSE CAST(:keep AS interval) END
"""
_DELETE_OLD = text(f"""
    DELETE FROM budget_window WHERE (budget_id, starts_at) IN (
        SELECT w.budget_id, w.starts_at FROM budget_window w JOIN budget b ON b.id = w.budget_id
        WHERE {_IS_OLD} AND b.rolls_since IS NULL
        FOR UPDATE OF w SKIP LOCKED
    )
""")  # noqa: S608 - from the constant above
_ROLLING = text(f"""
    SELECT DISTINCT b.id FROM budget_window w JOIN budget b ON b.id = w.budget_id
    WHERE {_IS_OLD} AND b.rolls_since IS NOT NULL
""")  # noqa: S608
_FIRST_KEPT = text(f"""
    SELECT coalesce(min(w.starts_at) FILTER (WHERE NOT ({_IS_OLD})), max(w.starts_at))
    FROM budget_window w JOIN budget b ON b.id = w.budget_id WHERE b.id = :budget
""")  # noqa: S608
_FREEZE = text("""
    UPDATE budget_window w SET added = :added, limit_amount = coalesce(w.limit_amount, (
        SELECT p.limit_amount FROM budget_window p
        WHERE p.budget_id = w.budget_id AND p.starts_at < w.starts_at AND p.limit_amount IS NOT NULL
        ORDER BY p.starts_at DESC LIMIT 1
    ))
    WHERE w.budget_id = :budget AND w.starts_at = :starts_at
""")
_DELETE_BEFORE = text("DELETE FROM budget_window WHERE budget_id = :budget AND starts_at < :starts_at")
_DELETE_REPLICAS = text("""
    DELETE FROM replica r WHERE r.renewed_at < now() - CAST(:keep AS interval)
        AND NOT EXISTS (SELECT FROM lease l WHERE l.replica = r.name)
""")


async def clean_up(engine: AsyncEngine) -> None:
    """Delete windows and replicas of long ago. Safe to repeat and to cut off anywhere."""
    ages = {"keep": KEEP, "hours": KEEP_HOURS}
    async with engine.begin() as conn:
        await conn.execute(_DELETE_REPLICAS, {"keep": KEEP_REPLICA})
        await conn.execute(_DELETE_OLD, ages)
        rolling = list((await conn.execute(_ROLLING, ages)).scalars())
    for budget_id in rolling:
        async with engine.begin() as conn:
            await _shorten(conn, budget_id, ages)


async def _shorten(conn: AsyncConnection, budget_id: UUID, ages: dict[str, timedelta]) -> None:
    """Delete the first windows of a budget that rolls over; the first that stays keeps what they have brought it."""
    await rollover.lock(conn, [budget_id])
    first_kept = (await conn.execute(_FIRST_KEPT, ages | {"budget": budget_id})).scalar_one_or_none()
    if first_kept is None:  # the budget has gone meanwhile
        return
    added = await rollover.rolled_over(conn, {budget_id: first_kept})
    where = {"budget": budget_id, "starts_at": first_kept}
    if budget_id in added:
        await conn.execute(_FREEZE, where | {"added": added[budget_id]})
    await conn.execute(_DELETE_BEFORE, where)
