"""What leaves a wallet: captures of what calls were charged, and credit that expires. Top-ups are `billing.wallets`.

A wallet is a budget without a limit of its own: its one window has `added`, the sum of its credit, in place of it, so
leases come out of it as out of any window. Credit is used in the order of its end; what replicas have leased counts as
used the same way, so credit expires as soon as no lease covers it.

Whoever calls these has locked the wallets' windows (`budget_window`); nobody touches the rows of a wallet otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import structlog
from sqlalchemy import Row, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ids import new_id
from billing.pots import NOTHING, SUM

log = structlog.get_logger(__name__)

_WALLETS = text("SELECT budget_id, added, settled, leased FROM budget_window WHERE budget_id = ANY(:wallets)")
_CREDITS = text("""
    SELECT id, wallet_id, rest, expires_at FROM wallet_credit WHERE wallet_id = ANY(:wallets) AND rest > 0
    ORDER BY wallet_id, expires_at NULLS LAST, id
""")
_USE = text("""
    UPDATE wallet_credit c SET rest = c.rest - k.amount
    FROM unnest(CAST(:ids AS uuid[]), CAST(:amounts AS numeric[])) AS k (id, amount) WHERE c.id = k.id
""")
_NOT_SETTLED = text("UPDATE budget_window SET settled = settled - :amount WHERE budget_id = :wallet")
_TAKE_OFF = text("UPDATE budget_window SET added = added - :amount WHERE budget_id = :wallet")
_ENTER = text("""
    INSERT INTO wallet_entry (id, wallet_id, kind, amount, credit_id, expires_at, uncollected, note, actor)
    VALUES (:id, :wallet_id, :kind, :amount, :credit_id, :expires_at, :uncollected, :note,
        CASE WHEN :kind IN ('capture', 'expiry') THEN NULL ELSE nullif(current_setting('farthing.actor', true), '') END)
""")
_NEXT_EXPIRY = text("""
    SELECT wallet_id, min(expires_at) AS expires_at FROM wallet_credit
    WHERE wallet_id = ANY(:wallets) AND rest > 0 AND expires_at > :moment GROUP BY wallet_id
""")


class Use(NamedTuple):
    """So much of one top-up."""

    credit_id: UUID
    amount: Decimal


async def capture(conn: AsyncConnection, charged: Mapping[UUID, Decimal]) -> None:
    """Take what was charged, and is in `settled` already, from the wallets' credit.

    What a wallet has not got (a charge above its hold, in a wallet that is used up) is not settled after all, and is
    noted as uncollected: a balance is never below zero.
    """
    credits = await _credits(conn, charged)
    for wallet in await conn.execute(_WALLETS, {"wallets": sorted(charged)}):
        amount = charged[wallet.budget_id]
        missing = max(SUM.subtract(SUM.add(wallet.settled, wallet.leased), wallet.added), NOTHING)
        if missing:
            log.warning("a wallet had less than was charged", wallet=str(wallet.budget_id), uncollected=str(missing))
            await conn.execute(_NOT_SETTLED, {"wallet": wallet.budget_id, "amount": missing})
            await enter(conn, wallet.budget_id, "capture", NOTHING, uncollected=missing)
        uses = use(credits.get(wallet.budget_id, ()), SUM.subtract(amount, missing))
        await take(conn, wallet.budget_id, "capture", uses)


async def expire(conn: AsyncConnection, wallets: Iterable[UUID], moment: datetime) -> dict[UUID, datetime]:
    """Take off what has expired by `moment` and no lease covers; return when the next credit of each wallet expires."""
    ids = sorted(wallets)
    credits = await _credits(conn, ids)
    due = {
        wallet_id: [credit for credit in found if credit.expires_at is not None and credit.expires_at <= moment]
        for wallet_id, found in credits.items()
    }
    if any(due.values()):
        for wallet in await conn.execute(_WALLETS, {"wallets": ids}):
            uses = not_covered(due.get(wallet.budget_id, ()), wallet.leased)
            if gone := sum_of(uses):
                await conn.execute(_TAKE_OFF, {"wallet": wallet.budget_id, "amount": gone})
                await take(conn, wallet.budget_id, "expiry", uses)
    rows = await conn.execute(_NEXT_EXPIRY, {"wallets": ids, "moment": moment})
    return {row.wallet_id: row.expires_at for row in rows}


def use(credits: Iterable[Any], amount: Decimal) -> list[Use]:
    """`amount` out of credits (each with an `id` and a `rest`), the first of them first."""
    uses = []
    for credit in credits:
        part = min(credit.rest, amount)
        if part > 0:
            uses.append(Use(credit.id, part))
            amount = SUM.subtract(amount, part)
    return uses


def not_covered(credits: Iterable[Any], leased: Decimal) -> list[Use]:
    """All of these credits but for what is leased, which covers the first of them first."""
    uses = []
    for credit in credits:
        covered = min(credit.rest, leased)
        leased = SUM.subtract(leased, covered)
        if credit.rest > covered:
            uses.append(Use(credit.id, SUM.subtract(credit.rest, covered)))
    return uses


def sum_of(uses: Iterable[Use]) -> Decimal:
    amount = NOTHING
    for part in uses:
        amount = SUM.add(amount, part.amount)
    return amount


async def take(conn: AsyncConnection, wallet_id: UUID, kind: str, uses: Sequence[Use], note: str | None = None) -> None:
    """Take these parts from their credits, an entry each."""
    if not uses:
        return
    await conn.execute(_USE, {"ids": [part.credit_id for part in uses], "amounts": [part.amount for part in uses]})
    for part in uses:
        await enter(conn, wallet_id, kind, -part.amount, credit_id=part.credit_id, note=note)


async def enter(
    conn: AsyncConnection,
    wallet_id: UUID,
    kind: str,
    amount: Decimal,
    *,
    identifier: UUID | None = None,
    credit_id: UUID | None = None,
    expires_at: datetime | None = None,
    uncollected: Decimal = NOTHING,
    note: str | None = None,
) -> UUID:
    """Write an entry; return its id."""
    entry_id = identifier or new_id()
    entry = {"id": entry_id, "wallet_id": wallet_id, "kind": kind, "amount": amount}
    entry |= {"credit_id": credit_id, "expires_at": expires_at, "uncollected": uncollected, "note": note}
    await conn.execute(_ENTER, entry)
    return entry_id


async def _credits(conn: AsyncConnection, wallets: Iterable[UUID]) -> dict[UUID, list[Row[Any]]]:
    """What is left of each top-up, in the order of use."""
    found: dict[UUID, list[Row[Any]]] = {}
    for row in await conn.execute(_CREDITS, {"wallets": sorted(wallets)}):
        found.setdefault(row.wallet_id, []).append(row)
    return found
