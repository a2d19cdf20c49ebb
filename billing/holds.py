"""Taking holds off their windows, by settlement or by release; windows are locked in key order, so nobody deadlocks."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

_OF_OPERATIONS = text("""
    DELETE FROM hold WHERE operation_id = ANY(:operations)
    RETURNING operation_id, budget_id, starts_at, amount
""")
_OF_EARLIER_RUNS = text("""
    DELETE FROM hold WHERE starts_with(replica, :place || '.') AND replica <> :replica
    RETURNING operation_id, budget_id, starts_at, amount
""")
_LOCK = text("""
    SELECT 1 FROM budget_window w
    JOIN unnest(CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[])) AS k (budget_id, starts_at)
        USING (budget_id, starts_at)
    ORDER BY budget_id, starts_at FOR UPDATE OF w
""")
_MOVE = text("""
    UPDATE budget_window w SET leased = w.leased - k.held, settled = w.settled + k.billed
    FROM (
        SELECT budget_id, starts_at, sum(held) AS held, sum(billed) AS billed
        FROM unnest(
            CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[]),
            CAST(:held AS numeric[]), CAST(:billed AS numeric[])
        ) AS t (budget_id, starts_at, held, billed)
        GROUP BY budget_id, starts_at
    ) AS k
    WHERE w.budget_id = k.budget_id AND w.starts_at = k.starts_at
""")


async def settle(conn: AsyncConnection, billed: Mapping[UUID, Decimal | None]) -> None:
    """Replace the holds of these operations by what they were billed, in the windows that they were admitted in.

    The charge counts in full even where it exceeds the hold; an unknown charge (None) counts nothing. An operation
    without a hold had no budget when it was admitted.
    """
    if billed:
        rows = (await conn.execute(_OF_OPERATIONS, {"operations": list(billed)})).all()
        await _move(conn, rows, billed)


async def release(conn: AsyncConnection, operations: Sequence[UUID]) -> None:
    """Free the holds of operations that never reached an upstream."""
    await settle(conn, dict.fromkeys(operations))


async def release_earlier_runs(conn: AsyncConnection, replica: str) -> int:
    """Free what earlier processes on `replica`'s spool still hold; return how many holds.

    `replica` is `place.run` (see `billing.spool`). Only call this once that spool has been drained: then a hold left
    over belongs to an operation that died before it was recorded.
    """
    place = replica.partition(".")[0]
    rows = (await conn.execute(_OF_EARLIER_RUNS, {"place": place, "replica": replica})).all()
    await _move(conn, rows, {})
    return len(rows)


async def _move(conn: AsyncConnection, rows: Sequence[Row[Any]], billed: Mapping[UUID, Decimal | None]) -> None:
    if not rows:
        return
    keys = {"budgets": [row.budget_id for row in rows], "starts": [row.starts_at for row in rows]}
    await conn.execute(_LOCK, keys)
    held = [row.amount for row in rows]
    charges = [billed.get(row.operation_id) or Decimal(0) for row in rows]
    await conn.execute(_MOVE, keys | {"held": held, "billed": charges})
