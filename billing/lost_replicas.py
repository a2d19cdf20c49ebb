"""Gateways that are gone for good: what they still have leased, and how an operator frees it.

A gateway that was killed gives nothing back. The next one on its spool does that by itself, once it has copied what was
spooled (`billing.settlements.free_earlier_runs`). Only where that spool will never be read again, because its disk is
gone, somebody has to say so.
"""

from datetime import datetime
from decimal import Decimal

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.lease_rounds import LOST_SECONDS
from billing.pots import EXACT
from billing.settlements import free_replica

_LEASES = text("""
    SELECT l.replica, r.renewed_at, extract(epoch FROM now() - r.renewed_at) < :seconds AS alive,
        count(*) FILTER (WHERE l.granted > l.settled) AS leases,
        coalesce(jsonb_object_agg(unit, CAST(held AS text)) FILTER (WHERE held > 0), '{}') AS held
    FROM (
        SELECT l.replica, coalesce(b.currency, b.unit) AS unit, l.granted, l.settled,
            sum(l.granted - l.settled) OVER (PARTITION BY l.replica, coalesce(b.currency, b.unit)) AS held
        FROM lease l JOIN budget b ON b.id = l.budget_id WHERE b."window" <> 'minute'
    ) AS l
    LEFT JOIN replica r ON r.name = l.replica
    GROUP BY l.replica, r.renewed_at
    ORDER BY r.renewed_at DESC NULLS LAST, l.replica
""")
_HEARD = text("""
    SELECT extract(epoch FROM now() - renewed_at) AS ago FROM replica WHERE name = :replica FOR UPDATE
""")
_IS_THERE = text("SELECT 1 FROM lease WHERE replica = :replica LIMIT 1")


class ReplicaLeases(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway process has out of all windows. A minute's limits are left out: they pass by themselves."""

    replica: str
    renewed_at: datetime | None
    """When it last said that it lives; None: it never did."""
    alive: bool
    leases: int
    held: dict[str, Decimal]
    """Neither charged nor given back, over all windows: by currency, and calls at once as `concurrent`."""


async def list_leases(conn: AsyncConnection) -> list[ReplicaLeases]:
    """All processes that have leases, those that were heard of last first."""
    rows = await conn.execute(_LEASES, {"seconds": LOST_SECONDS})
    return [
        ReplicaLeases(
            replica=row.replica,
            renewed_at=row.renewed_at,
            alive=bool(row.alive),
            leases=row.leases,
            held={unit: Decimal(amount).normalize(EXACT) for unit, amount in row.held.items()},
        )
        for row in rows
    ]


async def free_leases(conn: AsyncConnection, replica: str) -> int:
    """Free all that this process has leased; return how many leases had something left.

    What it spooled and nobody copied is not charged to any budget then; should its spool be copied later all the same,
    that counts in addition, and a budget may be over. Raises ValueError when it has no lease, and when it lives.
    """
    heard = (await conn.execute(_HEARD, {"replica": replica})).scalar_one_or_none()
    if heard is not None and heard < LOST_SECONDS:
        raise ValueError(
            f"{replica} was heard of {max(int(heard), 0)} seconds ago: it lives, and gives back what it does not use"
        )
    if (await conn.execute(_IS_THERE, {"replica": replica})).first() is None:
        raise ValueError(f"{replica} has no lease; `farthing leases list` shows who has")
    return await free_replica(conn, replica)
