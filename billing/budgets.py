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

from billing import rollover as rolling
from billing.allowances import ScopeKind, scope_of, tell_changed
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
    also: dict[ScopeKind, str]
    """Further scopes that a call must have."""
    window: Window
    time_zone: str
    limit_amount: Decimal
    currency: str
    hard: bool
    """A hard budget refuses what it cannot pay; a soft one only counts."""
    rollover: bool
    """Whether what is left of a window adds to the next."""
    rollover_cap: Decimal | None
    """The most that is carried into a window; None: no cap."""
    rolled_over: Decimal
    """What was carried into this one: `limit_amount + rolled_over` may be spent in it."""
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
    also: Mapping[ScopeKind, str] | None = None,
    currency: str,
    time_zone: str = "UTC",
    hard: bool = True,
    rollover: bool = False,
    rollover_cap: Decimal | None = None,
) -> UUID:
    """Make the scope's budget for this kind of window, or change the one there is; return its id.

    `also` are further scopes, of other kinds: only calls that have all of them are counted. With `rollover`, from the
    window of now on, what is left of a window adds to the next, at most `rollover_cap`. A call is counted in the
    budgets that its scopes had when it was admitted. A new time zone starts a new window, with nothing spent and
    nothing rolled over. Raises ValueError on an unknown scope kind, window or zone, on a bad limit or cap, on a
    currency that is not three capital letters, and on another one than the budget already has: what its window has
    counted is in the old one.
    """
    narrowest, identified, others = scope_of(scope_kind, str(scope_id), also)
    if window not in get_args(Window):
        raise ValueError(f"{window!r} is not a window; use one of {', '.join(get_args(Window))}")
    refuse_bad_amount("limit", limit)
    refuse_bad_currency(currency)
    if rollover and window == "none":
        raise ValueError("a budget without reset has no next window for what is left; leave out the rollover")
    if rollover_cap is not None:
        refuse_bad_amount("rollover cap", rollover_cap)
        if not rollover:
            raise ValueError("a rollover cap says how much rolls over; set the rollover too")
    scope = {"scope_kind": narrowest, "scope_id": identified, "also": others}
    key: dict[str, Any] = {**scope, "unit": "money", "window": window, "prepaid": False}
    before = await conn.execute(
        select(budget.c.rolls_since, budget.c.time_zone).filter_by(**key).with_for_update(key_share=True)
    )
    rolls_since, zone_before = before.one_or_none() or (None, None)
    now: datetime = (await conn.execute(select(func.clock_timestamp()))).scalar_one()
    starts_at, _ = window_bounds(now, window, zone(time_zone))
    if not rollover:
        rolls_since = None
    elif rolls_since is None or zone_before != time_zone:
        rolls_since = starts_at
    terms = {"limit_amount": limit, "currency": currency, "time_zone": time_zone, "hard": hard}
    terms |= {"rolls_since": rolls_since, "rollover_cap": rollover_cap}
    row = insert(budget).values(id=new_id(), **key, **terms)
    row = row.on_conflict_do_update(
        index_elements=list(key), set_=terms, where=budget.c.currency == row.excluded.currency
    )
    identifier: UUID | None = (await conn.execute(row.returning(budget.c.id))).scalar_one_or_none()
    if identifier is None:
        whose = " and ".join([narrowest, *others])
        raise ValueError(f"this {whose} has a budget in another currency than {currency}; remove that one first")
    await rolling.change(conn, identifier, starts_at, rollover)
    await tell_changed(conn, narrowest, identified)
    return identifier


def refuse_bad_amount(name: str, amount: Decimal) -> None:
    """Raise ValueError, with a sentence, on what is below 0, too large, or has too many decimals."""
    refuse_bad_money(**{name: amount})
    _, digits, exponent = amount.as_tuple()
    if amount >= LARGEST_LIMIT or (any(digits) and int(exponent) < SMALLEST_DIGIT):
        raise ValueError(
            f"{name} is {amount}: it must be below {LARGEST_LIMIT:f}, with {-SMALLEST_DIGIT} decimals at most"
        )


def refuse_bad_currency(currency: str) -> None:
    if not re.fullmatch("[A-Z]{3}", currency):
        raise ValueError(f"{currency!r} is not a currency; use its three capital letters, like USD")


async def remove_budget(conn: AsyncConnection, budget_id: UUID) -> bool:
    """Forget a budget with its windows and leases; False when there is none. The ledger keeps what was spent."""
    gone = delete(budget).where(budget.c.id == budget_id, budget.c.unit == "money", ~budget.c.prepaid)
    scope = (await conn.execute(gone.returning(budget.c.scope_kind, budget.c.scope_id))).one_or_none()
    if scope is not None:
        await tell_changed(conn, scope.scope_kind, scope.scope_id)
    return scope is not None


async def list_budgets(conn: AsyncConnection) -> list[Budget]:
    """All budgets, in the order of their ids, each with the window of now (the database's clock)."""
    query = select(budget, func.now().label("now")).where(budget.c.unit == "money", ~budget.c.prepaid)
    rows = (await conn.execute(query.order_by(budget.c.id))).mappings().all()
    bounds = {row["id"]: window_bounds(row["now"], row["window"], zone(row["time_zone"])) for row in rows}
    starts = {budget_id: start for budget_id, (start, _) in bounds.items()}
    used = {row.budget_id: row for row in await _windows(conn, starts)}
    rolled_over = await rolling.rolled_over(conn, {row["id"]: starts[row["id"]] for row in rows if row["rolls_since"]})
    fields = set(budget.c.keys()) & set(Budget.__struct_fields__)
    return [
        Budget(
            **{name: row[name] for name in fields},
            rollover=row["rolls_since"] is not None,
            rolled_over=rolled_over.get(row["id"], Decimal(0)),
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
