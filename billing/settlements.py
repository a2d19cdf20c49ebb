"""Charges against windows: how operations that reach the ledger, and leases of processes that died, end.

A charge moves from a window's `leased` to its `settled`, as far as it was held; what exceeds the hold is settled all
the same. Windows are locked first, in the order of their keys, then leases, so nobody deadlocks.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import captures
from billing.pots import NOTHING, SUM
from billing.records import OperationRecord

_CHARGE = text("""
    WITH charged AS (
        INSERT INTO budget_window AS w (budget_id, starts_at, settled)
        SELECT b.id, k.starts_at, sum(k.billed)
        FROM unnest(CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[]), CAST(:billed AS numeric[]))
            AS k (id, starts_at, billed) JOIN budget b USING (id)
        GROUP BY b.id, k.starts_at
        ORDER BY b.id, k.starts_at
        ON CONFLICT (budget_id, starts_at) DO UPDATE SET settled = w.settled + excluded.settled
        RETURNING budget_id
    )
    SELECT b.id FROM charged JOIN budget b ON b.id = charged.budget_id WHERE b.prepaid
""")
_SPEND = text("""
    WITH charged AS (
        SELECT budget_id, starts_at, replica, sum(amount) AS amount
        FROM unnest(
            CAST(:budgets AS uuid[]), CAST(:starts AS timestamptz[]), CAST(:replicas AS text[]),
            CAST(:amounts AS numeric[])
        ) AS k (budget_id, starts_at, replica, amount)
        GROUP BY budget_id, starts_at, replica
    ), spent AS (
        SELECT budget_id, starts_at, replica, least(c.amount, l.granted - l.settled) AS amount
        FROM lease l JOIN charged c USING (budget_id, starts_at, replica)
    ), moved AS (
        UPDATE lease l SET settled = l.settled + s.amount
        FROM spent s WHERE l.budget_id = s.budget_id AND l.starts_at = s.starts_at AND l.replica = s.replica
    )
    UPDATE budget_window w SET leased = w.leased - s.amount
    FROM (SELECT budget_id, starts_at, sum(amount) AS amount FROM spent GROUP BY budget_id, starts_at) AS s
    WHERE w.budget_id = s.budget_id AND w.starts_at = s.starts_at
""")
_SET_ASIDE = text("INSERT INTO operation_set_aside (id) VALUES (:id) ON CONFLICT DO NOTHING")

_EARLIER_RUNS = "starts_with(l.replica, :place || '.') AND l.replica <> :replica"
_LOST = """b.unit = 'concurrent' AND l.replica IN (
    SELECT name FROM replica WHERE renewed_at < now() - make_interval(secs => :seconds)
)"""
_ONE = "l.replica = :replica"

_FORGET_EARLIER_RUNS = text("DELETE FROM replica WHERE starts_with(name, :place || '.') AND name <> :replica")
_MARK = text("UPDATE replica SET freed_at = now() WHERE name = ANY(:replicas)")


_Place = tuple[UUID, datetime, str]
"""A budget, the start of its window, and whose lease it was."""


async def settle(conn: AsyncConnection, operations: Iterable[OperationRecord], count: bool = True) -> None:
    """Charge what these operations were billed, in the windows that they were admitted in; call it once for each.

    The charge counts in full even where it exceeds the hold, except that a wallet gives what it has and no more
    (`billing.captures`); an unknown charge (None) counts nothing. `count=False` only ends the holds. A budget that is
    gone counts nothing.
    """
    sums: dict[_Place, list[Decimal]] = {}  # what is counted, and what of it was held
    for operation in operations:
        billed, replica = operation.billed, operation.replica
        if billed:
            for charge in operation.charges:
                key = (charge.budget_id, charge.starts_at, replica)
                if (both := sums.get(key)) is None:  # an id's hash takes longer than all of the sums
                    both = sums[key] = [NOTHING, NOTHING]
                both[0] = SUM.add(both[0], billed)
                both[1] = SUM.add(both[1], min(billed, charge.held))
    if not sums:
        return
    keys = {"budgets": [budget for budget, _, _ in sums], "starts": [starts_at for _, starts_at, _ in sums]}
    billed_of = {"billed": [counted if count else NOTHING for counted, _ in sums.values()]}
    wallets = set((await conn.execute(_CHARGE, keys | billed_of)).scalars())
    spent = {"replicas": [replica for _, _, replica in sums], "amounts": [ended for _, ended in sums.values()]}
    await conn.execute(_SPEND, keys | spent)
    if wallets and count:
        await captures.capture(conn, _by_wallet(sums, wallets))


def _by_wallet(sums: Mapping[_Place, Sequence[Decimal]], wallets: set[UUID]) -> dict[UUID, Decimal]:
    amounts = dict.fromkeys(wallets, NOTHING)
    for (budget_id, _, _), (counted, _) in sums.items():
        if budget_id in wallets:
            amounts[budget_id] = SUM.add(amounts[budget_id], counted)
    return amounts


async def set_aside(conn: AsyncConnection, operation_id: UUID) -> bool:
    """Note that an operation is charged though it cannot be stored; False when that was noted before."""
    return (await conn.execute(_SET_ASIDE, {"id": operation_id})).rowcount == 1


async def free_earlier_runs(conn: AsyncConnection, replica: str) -> int:
    """Free what earlier processes on `replica`'s spool have leased; return how many leases had something left.

    `replica` is `place.run` (see `billing.spool`). Only call this once that spool has been drained: then whatever is
    left of those leases was never charged.
    """
    which = {"place": replica.partition(".")[0], "replica": replica}
    freed = await _free(conn, _EARLIER_RUNS, which)
    await conn.execute(_FORGET_EARLIER_RUNS, which)
    return sum(rest > 0 for _, rest in freed)


async def free_lost(conn: AsyncConnection, seconds: float) -> int:
    """Free calls at once of replicas that have not said for so long that they live; return how many leases."""
    return await _mark(conn, await _free(conn, _LOST, {"seconds": seconds}))


async def free_replica(conn: AsyncConnection, replica: str) -> int:
    """Free all leases of a replica that will never be heard of again; return how many had something left."""
    freed = await _free(conn, _ONE, {"replica": replica})
    await conn.execute(_MARK, {"replicas": [replica]})
    return sum(rest > 0 for _, rest in freed)


async def _mark(conn: AsyncConnection, freed: Sequence[tuple[str, Decimal]]) -> int:
    """Let the replicas know it, should they live after all (`Store.renew`)."""
    if freed:
        await conn.execute(_MARK, {"replicas": sorted({replica for replica, _ in freed})})
    return sum(rest > 0 for _, rest in freed)


async def _free(conn: AsyncConnection, which: str, parameters: Mapping[str, Any]) -> list[tuple[str, Decimal]]:
    """Whose leases were freed, and how much. A minute's count goes with the minute: what was used in it stays used."""
    leases = f"lease l JOIN budget b ON b.id = l.budget_id WHERE {which}"
    lock = text(
        "SELECT 1 FROM budget_window w WHERE (w.budget_id, w.starts_at) IN "  # noqa: S608 - from the constants above
        f"(SELECT l.budget_id, l.starts_at FROM {leases}) ORDER BY w.budget_id, w.starts_at FOR UPDATE"
    )
    free = text(f"""
        WITH ended AS (
            DELETE FROM lease l USING budget b WHERE b.id = l.budget_id AND {which}
            RETURNING l.budget_id, l.starts_at, l.replica,
                CASE b."window" WHEN 'minute' THEN 0 ELSE l.granted - l.settled END AS rest
        ), moved AS (
            UPDATE budget_window w SET leased = w.leased - e.rest
            FROM (SELECT budget_id, starts_at, sum(rest) AS rest FROM ended GROUP BY budget_id, starts_at) AS e
            WHERE w.budget_id = e.budget_id AND w.starts_at = e.starts_at AND e.rest > 0
        )
        SELECT replica, rest FROM ended
    """)  # noqa: S608
    if (await conn.execute(lock, parameters)).first() is None:
        return []
    return [(row.replica, row.rest) for row in await conn.execute(free, parameters)]
