"""Budgets: how much a scope may spend in a window. Taking money out of them is `billing.leases`."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, get_args
from uuid import UUID

import msgspec
from sqlalchemy import Row, delete, func, select, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.allowances import ScopeKind, refuse_bad_scope, tell_changed
from billing.ids import new_id
from billing.records import refuse_bad_money
from billing.tables import budget, budget_window
from billing.windows import Window, window_bounds, zone

LARGEST_LIMIT = Decimal(10**15)
SMALLEST_DIGIT = -18
"""Power of ten of the last decimal that a limit may have."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget and its current window."""

    id: UUID
    scope_kind: ScopeKind
    scope_id: str
    """The id of the org, team, user or key; a model's name; a tag as `name=value`."""
    window: Window
    time_zone: str
    limit_amount: Decimal
    currency: str
    hard: bool
    """A hard budget refuses what it cannot pay; a soft one only counts."""
    starts_at: datetime
    resets_at: datetime | None
    leased: Decimal
    """Taken out by gateways, for calls that run and calls to come."""
    settled: Decimal
    """Charged for calls that are over."""


async def set_budget(
    conn: AsyncConnection,
    scope_kind: ScopeKind,
    scope_id: UUID | str,
    window: Window,
    limit: Decimal,
    *,
    currency: str,
    time_zone: str = "UTC",
    hard: bool = True,
) -> UUID:
    """Make the scope's budget for this kind of window, or change the one there is; return its id.

    A call is counted in the budgets that its scopes had when it was admitted. A new time zone starts a new window,
    with nothing spent. Raises ValueError on an unknown scope kind, window or zone, on a bad limit, on a currency that
    is not three capital letters, and on another one than the budget already has: what its window has counted is in the
    old one.
    """
    refuse_bad_scope(scope_kind, str(scope_id))
    if window not in get_args(Window):
        raise ValueError(f"{window!r} is not a window; use one of {', '.join(get_args(Window))}")
    refuse_bad_money(limit=limit)
    _, digits, exponent = limit.as_tuple()
    if limit >= LARGEST_LIMIT or (any(digits) and int(exponent) < SMALLEST_DIGIT):
        raise ValueError(
            f"limit is {limit}: it must be below {LARGEST_LIMIT:f}, with {-SMALLEST_DIGIT} decimals at most"
        )
    if not re.fullmatch("[A-Z]{3}", currency):
        raise ValueError(f"{currency!r} is not a currency; use its three capital letters, like USD")
    zone(time_zone)
    terms = {"limit_amount": limit, "currency": currency, "time_zone": time_zone, "hard": hard}
    key = {"scope_kind": scope_kind, "scope_id": str(scope_id), "unit": "money", "window": window}
    row = insert(budget).values(id=new_id(), **key, **terms)
    row = row.on_conflict_do_update(
        index_elements=list(key), set_=terms, where=budget.c.currency == row.excluded.currency
    )
    identifier: UUID | None = (await conn.execute(row.returning(budget.c.id))).scalar_one_or_none()
    if identifier is None:
        raise ValueError(f"this {scope_kind} has a budget in another currency than {currency}; remove that one first")
    await tell_changed(conn, scope_kind, str(scope_id))
    return identifier


async def remove_budget(conn: AsyncConnection, budget_id: UUID) -> bool:
    """Forget a budget with its windows and leases; False when there is none. The ledger keeps what was spent."""
    gone = delete(budget).where(budget.c.id == budget_id, budget.c.unit == "money")
    scope = (await conn.execute(gone.returning(budget.c.scope_kind, budget.c.scope_id))).one_or_none()
    if scope is not None:
        await tell_changed(conn, scope.scope_kind, scope.scope_id)
    return scope is not None


async def list_budgets(conn: AsyncConnection) -> list[Budget]:
    """All budgets, in the order of their ids, each with the window of now (the database's clock)."""
    query = select(budget, func.now().label("now")).where(budget.c.unit == "money").order_by(budget.c.id)
    rows = (await conn.execute(query)).mappings().all()
    bounds = {row["id"]: window_bounds(row["now"], row["window"], zone(row["time_zone"])) for row in rows}
    used = {row.budget_id: row for row in await _windows(conn, {key: start for key, (start, _) in bounds.items()})}
    fields = set(budget.c.keys()) & set(Budget.__struct_fields__)
    return [
        Budget(
            **{name: row[name] for name in fields},
            starts_at=bounds[row["id"]][0],
            resets_at=bounds[row["id"]][1],
            leased=used[row["id"]].leased if row["id"] in used else Decimal(0),
            settled=used[row["id"]].settled if row["id"] in used else Decimal(0),
        )
        for row in rows
    ]


async def _windows(conn: AsyncConnection, starts: Mapping[UUID, datetime]) -> Sequence[Row[tuple[Any, ...]]]:
    """Rows of `budget_window`; a window is there from its first use on."""
    if not starts:
        return []
    columns = budget_window.c
    return (
        await conn.execute(
            select(budget_window).where(tuple_(columns.budget_id, columns.starts_at).in_(list(starts.items())))
        )
    ).all()
