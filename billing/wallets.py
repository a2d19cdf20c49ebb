"""Prepaid wallets: credit that a scope has paid for in advance. What leaves them is `billing.captures`.

Its balance is never below zero: a call is only admitted when its worst case can be held, and calls of one wallet on any
number of gateways hold parts of it in leases (`billing.leases`).
"""

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import func, select, text, update
from sqlalchemy import insert as insert_into
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import captures
from billing.allowances import CHANNEL, ScopeKind, scope_of, tell_changed
from billing.budgets import refuse_bad_amount, refuse_bad_currency
from billing.ids import new_id
from billing.notices import notify
from billing.pots import NOTHING
from billing.tables import budget, wallet_credit, wallet_entry
from billing.windows import BEGINNING

_LOCK = text("""
    INSERT INTO budget_window AS w (budget_id, starts_at) VALUES (:wallet, :beginning)
    ON CONFLICT (budget_id, starts_at) DO UPDATE SET leased = w.leased
    RETURNING added, settled, leased, clock_timestamp() AS now
""").bindparams(beginning=BEGINNING)
_ADD = text("UPDATE budget_window SET added = added + :amount WHERE budget_id = :wallet")
_REFUNDED = text("SELECT coalesce(sum(amount), 0) FROM wallet_entry WHERE wallet_id = :wallet AND kind = 'refund'")
_WALLETS = text("""
    SELECT b.id, b.scope_kind, b.scope_id, b.also, b.currency, b.created_at, b.closed_at,
        coalesce(w.added - w.settled, 0) AS balance, coalesce(w.leased, 0) AS held,
        coalesce(due.rest, 0) AS expired, next.expires_at AS expires_at, coalesce(next.rest, 0) AS expiring
    FROM budget b
    LEFT JOIN budget_window w ON w.budget_id = b.id
    LEFT JOIN LATERAL (
        SELECT sum(rest) AS rest FROM wallet_credit WHERE wallet_id = b.id AND rest > 0 AND expires_at <= now()
    ) AS due ON true
    LEFT JOIN LATERAL (
        SELECT expires_at, sum(rest) AS rest FROM wallet_credit
        WHERE wallet_id = b.id AND rest > 0 AND expires_at > now() GROUP BY expires_at ORDER BY expires_at LIMIT 1
    ) AS next ON true
    WHERE b.prepaid AND (CAST(:wallet AS uuid) IS NULL OR b.id = :wallet)
    ORDER BY b.id
""")
_DUE = text("SELECT DISTINCT wallet_id FROM wallet_credit WHERE rest > 0 AND expires_at <= now()")


class Wallet(msgspec.Struct, frozen=True, kw_only=True):
    """A wallet as it is now."""

    id: UUID
    scope_kind: ScopeKind
    scope_id: str
    """The id of the org, team, user or key; a model's name; a tag as `name=value`."""
    also: dict[ScopeKind, str]
    """Further scopes that a call must have."""
    currency: str
    created_at: datetime
    closed_at: datetime | None
    """None: it is open. Calls are not paid from a closed one."""
    balance: Decimal
    """The sum of its entries: what was paid in and not charged yet."""
    held: Decimal
    """Of that, what gateways have taken out, for calls that run and calls to come."""
    available: Decimal
    """Of the balance, what is neither held nor expired."""
    expires_at: datetime | None
    """When credit expires next; None: none does."""
    expiring: Decimal
    """How much of it, if it is not used until then."""


class WalletEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a wallet's account."""

    id: UUID
    wallet_id: UUID
    kind: str
    """`top_up`, `capture` (what calls were charged: a line a batch of the ledger), `expiry`, `refund`, `adjustment`."""
    amount: Decimal
    """Added to the balance; below 0 where it is taken."""
    credit_id: UUID | None
    """The entry that brought what is taken here."""
    expires_at: datetime | None
    """Of what a top-up brings; None: never."""
    uncollected: Decimal
    """Charged and not there to be taken: the caller owes it, and the balance does not know it."""
    note: str | None
    actor: str | None
    """Who made it; None: the ledger."""
    created_at: datetime


async def create_wallet(
    conn: AsyncConnection,
    scope_kind: ScopeKind,
    scope_id: UUID | str,
    *,
    also: Mapping[ScopeKind, str] | None = None,
    currency: str,
) -> UUID:
    """Make the scope's wallet, with nothing in it; return its id. From then on its calls are paid from it. One that was
    closed is opened again, with its account.

    `also` are further scopes, of other kinds: only calls that have all of them are. Raises ValueError on what is no
    scope or currency, when the scope has a wallet, and when its closed one is in another currency.
    """
    narrowest, identified, others = scope_of(scope_kind, str(scope_id), also)
    refuse_bad_currency(currency)
    row = insert(budget).values(
        id=new_id(),
        scope_kind=narrowest,
        scope_id=identified,
        also=others,
        unit="money",
        window="none",
        limit_amount=NOTHING,
        currency=currency,
        prepaid=True,
    )
    opened = row.on_conflict_do_update(
        index_elements=["scope_kind", "scope_id", "also", "unit", "window", "prepaid"],
        set_={"closed_at": None},
        where=budget.c.closed_at.is_not(None) & (budget.c.currency == currency),
    )
    made = (await conn.execute(opened.returning(budget.c.id))).scalar_one_or_none()
    if made is None:
        has = await _wallet_of(conn, narrowest, identified, others)
        whose = f"this {' and '.join([narrowest, *others])}"
        if has.closed_at is None:
            raise ValueError(f"{whose} has a wallet; top that one up")
        raise ValueError(f"{whose} had a wallet in {has.currency}, and can only have that one again")
    await tell_changed(conn, narrowest, identified)
    identifier: UUID = made
    return identifier


async def top_up(
    conn: AsyncConnection,
    wallet_id: UUID,
    amount: Decimal,
    *,
    expires_at: datetime | None = None,
    note: str | None = None,
) -> UUID:
    """Add credit, which is used before any that expires later, or never; return the id of its entry.

    Raises ValueError when there is no such wallet, on an amount that is not above 0, and on an end that has passed.
    """
    return await _bring(conn, wallet_id, "top_up", amount, note, expires_at)


async def refund(conn: AsyncConnection, wallet_id: UUID, amount: Decimal, *, note: str | None = None) -> UUID:
    """Give back what calls were charged; it does not expire. Returns and raises as `top_up` does, and on more than they
    were charged and had back."""
    refuse_bad_amount("the amount", amount)
    charged: Decimal = (await _lock(conn, wallet_id)).settled
    refunded: Decimal = (await conn.execute(_REFUNDED, {"wallet": wallet_id})).scalar_one()
    if amount > charged - refunded:
        raise ValueError(
            f"{amount:f} cannot be given back: calls were charged {charged:f} from this wallet, and {refunded:f} of "
            "that was given back already; `farthing wallets top-up` adds other credit"
        )
    return await _bring(conn, wallet_id, "refund", amount, note)


async def adjust(conn: AsyncConnection, wallet_id: UUID, amount: Decimal, *, note: str) -> None:
    """Correct a balance by so much, up or (below 0) down.

    Raises ValueError when there is no such wallet, on 0, and when less than that is available.
    """
    if amount >= 0:
        await _bring(conn, wallet_id, "adjustment", amount, note)
        return
    refuse_bad_amount("the amount", -amount)
    await _lock(conn, wallet_id)
    found = await _expired(conn, wallet_id)
    available = found.added - found.settled - found.leased
    if -amount > available:
        raise ValueError(
            f"{-amount:f} cannot be taken: {available:f} is available, and gateways hold {found.leased:f} for calls"
        )
    await _take(conn, wallet_id, -amount, note)


async def close(conn: AsyncConnection, wallet_id: UUID, *, note: str) -> Decimal:
    """Take out of a wallet all that is available, and close it if calls hold nothing more: then they are not paid from
    it any more. Return what is still held: 0 where it is closed now.

    Gateways are asked to give back what no call uses, and can take no more; so call it again, in a transaction of its
    own, until the last call has ended. What is taken is an adjustment with this note. A wallet that is closed stays so.

    Raises ValueError when there is no such wallet, or no note.
    """
    if not note.strip():
        raise ValueError("say in a note why the wallet is closed: what is left in it is taken away")
    await _lock(conn, wallet_id, closed=True)
    found = await _expired(conn, wallet_id)
    await _take(conn, wallet_id, max(found.added - found.settled - found.leased, NOTHING), note)
    if found.leased:
        await notify(conn, CHANNEL, f"want - {wallet_id}")
    else:
        closed = (
            update(budget).where(budget.c.id == wallet_id, budget.c.closed_at.is_(None)).values(closed_at=func.now())
        )
        scope = (await conn.execute(closed.returning(budget.c.scope_kind, budget.c.scope_id))).one_or_none()
        if scope is not None:
            await tell_changed(conn, scope.scope_kind, scope.scope_id)
    held: Decimal = found.leased
    return held


async def list_wallets(conn: AsyncConnection) -> list[Wallet]:
    """All wallets, in the order of their ids."""
    return [_wallet(row) for row in (await conn.execute(_WALLETS, {"wallet": None})).mappings()]


async def get_wallet(conn: AsyncConnection, wallet_id: UUID) -> Wallet | None:
    """One wallet; None when there is none."""
    row = (await conn.execute(_WALLETS, {"wallet": wallet_id})).mappings().one_or_none()
    return None if row is None else _wallet(row)


async def list_entries(
    conn: AsyncConnection, wallet_id: UUID, *, before: UUID | None = None, limit: int = 100
) -> list[WalletEntry]:
    """A wallet's entries, the newest first: `limit` of them, older than the entry `before`."""
    query = select(*(wallet_entry.c[name] for name in WalletEntry.__struct_fields__))
    query = query.where(wallet_entry.c.wallet_id == wallet_id).order_by(wallet_entry.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(wallet_entry.c.id < before)
    return [WalletEntry(**row) for row in (await conn.execute(query)).mappings()]


async def expire_credit(engine: AsyncEngine) -> None:
    """Write off what has expired, wallet by wallet: one that is used does it by itself, one that rests does not."""
    async with engine.connect() as conn:
        due = list((await conn.execute(_DUE)).scalars())
    for wallet_id in due:
        async with engine.begin() as conn:
            await _lock(conn, wallet_id, closed=True)
            await _expired(conn, wallet_id)


async def _bring(
    conn: AsyncConnection,
    wallet_id: UUID,
    kind: str,
    amount: Decimal,
    note: str | None,
    expires_at: datetime | None = None,
) -> UUID:
    refuse_bad_amount("the amount", amount)
    if not amount:
        raise ValueError("the amount is 0: nothing would change")
    if expires_at is not None and expires_at.tzinfo is None:
        raise ValueError(f"{expires_at} has no time zone; write it like {expires_at.isoformat()}+00:00")
    found = await _lock(conn, wallet_id)
    if expires_at is not None and expires_at <= found.now:
        raise ValueError(f"{expires_at.isoformat()} has passed: the credit could never be used")
    identifier = new_id()
    credit = {"id": identifier, "wallet_id": wallet_id, "rest": amount, "expires_at": expires_at}
    await conn.execute(insert_into(wallet_credit), credit)
    await conn.execute(_ADD, {"wallet": wallet_id, "amount": amount})
    await captures.enter(conn, wallet_id, kind, amount, identifier=identifier, expires_at=expires_at, note=note)
    await notify(conn, CHANNEL, f"gave - {wallet_id}")
    return identifier


async def _take(conn: AsyncConnection, wallet_id: UUID, amount: Decimal, note: str) -> None:
    """Take so much, which is available, out of its credit: what expires first goes first."""
    credits = await conn.execute(
        select(wallet_credit.c.id, wallet_credit.c.rest)
        .where(wallet_credit.c.wallet_id == wallet_id, wallet_credit.c.rest > 0)
        .order_by(wallet_credit.c.expires_at.nulls_last(), wallet_credit.c.id)
    )
    await conn.execute(_ADD, {"wallet": wallet_id, "amount": -amount})
    await captures.take(conn, wallet_id, "adjustment", captures.use(credits, amount), note)


async def _wallet_of(conn: AsyncConnection, kind: str, identifier: str, also: Mapping[ScopeKind, str]) -> Any:
    query = select(budget.c.currency, budget.c.closed_at).where(
        budget.c.scope_kind == kind, budget.c.scope_id == identifier, budget.c.also == also, budget.c.prepaid
    )
    return (await conn.execute(query)).one()


async def _lock(conn: AsyncConnection, wallet_id: UUID, closed: bool = False) -> Any:
    """Its window, locked until this transaction ends. Raises ValueError when it is no wallet, or (unless `closed`) no
    open one."""
    closed_at = select(budget.c.closed_at).where(budget.c.id == wallet_id, budget.c.prepaid)
    if (await conn.execute(closed_at)).one_or_none() is None:
        raise ValueError(f"there is no wallet {wallet_id}; `farthing wallets list` shows all")
    window = (await conn.execute(_LOCK, {"wallet": wallet_id})).one()
    since = (await conn.execute(closed_at)).scalar_one()  # under the lock nobody closes it
    if since is not None and not closed:
        raise ValueError(
            f"wallet {wallet_id} was closed at {since:%Y-%m-%d %H:%M} UTC; `farthing wallets create` for its scope "
            "opens it again"
        )
    return window


async def _expired(conn: AsyncConnection, wallet_id: UUID) -> Any:
    """Its window, which is locked, once what has expired is taken off."""
    now = (await conn.execute(text("SELECT clock_timestamp()"))).scalar_one()
    await captures.expire(conn, [wallet_id], now)
    return (await conn.execute(_LOCK, {"wallet": wallet_id})).one()


def _wallet(row: Mapping[Any, Any]) -> Wallet:
    fields = {name: row[name] for name in Wallet.__struct_fields__ if name != "available"}
    return Wallet(**fields, available=row["balance"] - max(row["held"], row["expired"]))
