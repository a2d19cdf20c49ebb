"""What an operator asks of the ledger: who spent what, which tokens, which model. Reads only.

Sums are made by PostgreSQL in NUMERIC, adjustments included. Money that is unknown (NULL) is never added in as zero: it
is counted beside the sum. What whole hours and days came to is read from the rollups, where they are up to date.
"""

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement, FromClause, Row, Select, case, func, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.records import TOKEN_CLASSES, TokenClasses
from billing.tables import app_user, org, team
from billing.usage_rows import Step, usage_rows


class Within(msgspec.Struct, frozen=True, kw_only=True):
    """Whose operations a reader may see: those that fit everything that is given."""

    org_id: UUID | None = None
    user_id: UUID | None = None

    def of(self, query: Select[*tuple[Any, ...]], rows: FromClause) -> Select[*tuple[Any, ...]]:
        """`query`, for these operations only; `rows` has their `org_id` and `user_id`."""
        wanted = msgspec.structs.asdict(self)
        return query.where(*(rows.c[name] == value for name, value in wanted.items() if value is not None))


EVERYTHING = Within()

_SPENDING = (
    *("operations", "failed", "refused", "billed", "billed_unknown", "cost", "cost_unknown", "margin"),
    *("billed_adjustment", "cost_adjustment"),
)
"""Measures that a Spending is made of."""
_SAVINGS = (
    *("cache_saved", "cache_saved_unknown", "cached_answers", "saved_prompt_tokens", "saved_completion_tokens"),
    *("cached_answers_saved", "cached_answers_saved_unknown"),
)
"""Measures that a CacheSaving is made of."""


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """What a set of operations came to. A sum is None when there is something to sum and none of it is known."""

    operations: int
    failed: int
    """Ended in `upstream_error`."""
    refused: int
    """Ended in `refused`: a budget or a limit said no."""
    billed: Decimal | None
    billed_unknown: int
    """Operations that are not in `billed` because their charge is unknown."""
    cost: Decimal | None
    cost_unknown: int
    margin: Decimal | None
    """Billed less cost, over the operations that have both."""


class CurrencySpending(msgspec.Struct, frozen=True, kw_only=True):
    currency: str
    windows: tuple[Spending, ...]
    """One for each asked start."""


class UserSpending(msgspec.Struct, frozen=True, kw_only=True):
    user: str | None
    """None: keys that belong to no user."""
    team: str | None
    org: str | None
    currency: str
    windows: tuple[Spending, ...]


class SpendingPoint(msgspec.Struct, frozen=True, kw_only=True):
    at: datetime
    """Start of the hour or day, UTC."""
    currency: str
    spending: Spending


class TokenPoint(msgspec.Struct, frozen=True, kw_only=True):
    at: datetime
    model: str
    tokens: TokenClasses


class ModelShare(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    currency: str
    routed: int
    """Operations that asked for `auto`."""
    spending: Spending


class CacheSaving(msgspec.Struct, frozen=True, kw_only=True):
    currency: str
    amount: Decimal
    """What the cached prompt tokens would have been billed more as fresh ones."""
    unpriced_tokens: int
    """Cached tokens of operations in this currency that have no price."""
    answers: int
    """Given out of the response cache."""
    answers_tokens: int
    """That were not computed for them, prompt and completion."""
    answers_amount: Decimal
    """What their first callers were billed more than those who got them again."""
    answers_unknown: int
    """That are not in `answers_amount`."""


async def total_spending(
    connection: AsyncConnection, starts: Sequence[datetime], *, within: Within = EVERYTHING
) -> list[CurrencySpending]:
    """All spending from each of `starts` until now, one row a currency, the busiest currency first."""
    rows = await usage_rows(connection, min(starts), cuts=starts, measures=_SPENDING)
    query = within.of(select(rows.c.currency, *_windows(rows, starts)), rows).group_by(rows.c.currency)
    found = [
        CurrencySpending(currency=row.currency, windows=_read_windows(row, len(starts)))
        for row in await connection.execute(query)
    ]
    return sorted(found, key=lambda each: -max(window.operations for window in each.windows))


async def user_spending(
    connection: AsyncConnection, starts: Sequence[datetime], limit: int = 200, *, within: Within = EVERYTHING
) -> list[UserSpending]:
    """The `limit` users who were billed most since the earliest of `starts`, most first."""
    earliest = starts.index(min(starts))
    rows = await usage_rows(connection, min(starts), cuts=starts, measures=_SPENDING)
    about = (rows.c.org_id, rows.c.user_id, rows.c.currency)
    sums = within.of(select(*about, *_windows(rows, starts)), rows).group_by(*about).subquery()
    query = (
        select(sums, app_user.c.name.label("user"), team.c.name.label("team"), org.c.name.label("org"))
        .select_from(sums)
        .outerjoin(app_user, app_user.c.id == sums.c.user_id)
        .outerjoin(team, team.c.id == app_user.c.team_id)
        .outerjoin(org, org.c.id == sums.c.org_id)
        .order_by(
            sums.c[f"w{earliest}_billed"].desc().nulls_last(), sums.c[f"w{earliest}_operations"].desc(), sums.c.user_id
        )
        .limit(limit)
    )
    return [
        UserSpending(
            user=row.user, team=row.team, org=row.org, currency=row.currency, windows=_read_windows(row, len(starts))
        )
        for row in await connection.execute(query)
    ]


async def spending_over_time(
    connection: AsyncConnection, start: datetime, step: Step, *, within: Within = EVERYTHING
) -> list[SpendingPoint]:
    """Spending in each UTC hour or day from `start` that has any, in time order."""
    rows = await usage_rows(connection, start, step=step, measures=_SPENDING)
    at = _truncated(rows.c.at, step)
    query = within.of(select(at.label("at"), rows.c.currency, *_windows(rows, [start])), rows)
    return [
        SpendingPoint(at=row.at, currency=row.currency, spending=_read_windows(row, 1)[0])
        for row in await connection.execute(query.group_by(at, rows.c.currency).order_by(at))
    ]


async def tokens_over_time(
    connection: AsyncConnection, start: datetime, step: Step, *, within: Within = EVERYTHING
) -> list[TokenPoint]:
    """Tokens by class and answering model in each UTC hour or day from `start` that has any, in time order."""
    rows = await usage_rows(connection, start, step=step, measures=TOKEN_CLASSES)
    at = _truncated(rows.c.at, step)
    query = (
        within.of(select(at.label("at"), rows.c.model, *token_sums(rows)), rows)
        .group_by(at, rows.c.model)
        .having(func.sum(sum((rows.c[name] for name in TOKEN_CLASSES[1:]), rows.c[TOKEN_CLASSES[0]])) > 0)
        .order_by(at, rows.c.model)
    )
    return [TokenPoint(at=row.at, model=row.model, tokens=read_tokens(row)) for row in await connection.execute(query)]


async def model_shares(
    connection: AsyncConnection, start: datetime, *, within: Within = EVERYTHING
) -> list[ModelShare]:
    """How many operations each model answered from `start`, the busiest first. What was not dispatched is left out."""
    rows = await usage_rows(connection, start, measures=(*_SPENDING, "routed", "invalid"))
    refused = func.sum(rows.c.refused + rows.c.invalid).label("never")
    query = (
        within.of(select(rows.c.model, rows.c.currency, func.sum(rows.c.routed).label("routed"), refused), rows)
        .add_columns(*_windows(rows, [start]))
        .where(rows.c.model != "")
        .group_by(rows.c.model, rows.c.currency)
    )
    shares = []
    for row in await connection.execute(query):
        spending = _read_windows(row, 1)[0]
        if answered := spending.operations - int(row.never):
            spending = msgspec.structs.replace(spending, operations=answered, refused=0)
            shares.append(ModelShare(model=row.model, currency=row.currency, routed=int(row.routed), spending=spending))
    return sorted(shares, key=lambda share: (-share.spending.operations, share.model))


async def cache_savings(
    connection: AsyncConnection, start: datetime, *, within: Within = EVERYTHING
) -> list[CacheSaving]:
    """What prefix and response caches took off the bills from `start`, by the sale prices used, one row a currency."""
    rows = await usage_rows(connection, start, measures=_SAVINGS)
    sums = {name: func.sum(rows.c[name]) for name in _SAVINGS}
    query = (
        within.of(select(rows.c.currency, *(each.label(name) for name, each in sums.items())), rows)
        .group_by(rows.c.currency)
        .having((sums["cache_saved"] != 0) | (sums["cache_saved_unknown"] > 0) | (sums["cached_answers"] > 0))
    )
    return [
        CacheSaving(
            currency=row.currency,
            amount=row.cache_saved,
            unpriced_tokens=int(row.cache_saved_unknown),
            answers=int(row.cached_answers),
            answers_tokens=int(row.saved_prompt_tokens + row.saved_completion_tokens),
            answers_amount=row.cached_answers_saved,
            answers_unknown=int(row.cached_answers_saved_unknown),
        )
        for row in await connection.execute(query)
    ]


def _truncated(column: ColumnElement[datetime], step: Step) -> ColumnElement[datetime]:
    """Start of the UTC hour or day. Written into the SQL: as two parameters, SELECT and GROUP BY would not match."""
    return func.date_trunc(literal(step, literal_execute=True), column, literal("UTC", literal_execute=True))


def _windows(rows: FromClause, starts: Sequence[datetime]) -> list[ColumnElement[Any]]:
    """Columns that `_read_windows` turns into one Spending for each start; window i's are named `w{i}_…`."""
    columns: list[ColumnElement[Any]] = []
    for i, start in enumerate(starts):
        within = rows.c.at >= start
        for name in Spending.__struct_fields__:
            total: ColumnElement[Any] = func.sum(rows.c[name]).filter(within)
            if name in ("billed", "cost"):
                adjusted = func.sum(rows.c[f"{name}_adjustment"]).filter(within)
                # 0 where nothing is known and nothing was adjusted is no sum.
                total = case((adjusted != 0, func.coalesce(total, 0) + adjusted), else_=total)
            columns.append(total.label(f"w{i}_{name}"))
    return columns


def _read_windows(row: Row[Any], count: int) -> tuple[Spending, ...]:
    return tuple(_spending(row, f"w{i}_") for i in range(count))


def _spending(row: Row[Any], prefix: str) -> Spending:
    values = {name: row._mapping[prefix + name] for name in Spending.__struct_fields__}
    for name in ("operations", "failed", "refused", "billed_unknown", "cost_unknown"):
        values[name] = int(values[name] or 0)
    for name in ("billed", "cost"):
        if values[name] is None and not values[f"{name}_unknown"]:
            values[name] = Decimal(0)  # nothing was dispatched, so nothing is what it came to
    if values["margin"] is None and not (values["billed_unknown"] or values["cost_unknown"]):
        values["margin"] = Decimal(0)
    return Spending(**values)


def token_sums(rows: FromClause) -> list[ColumnElement[Any]]:
    """Columns that `read_tokens` makes a TokenClasses of."""
    return [func.coalesce(func.sum(rows.c[name]), 0).label(name) for name in TOKEN_CLASSES]


def read_tokens(row: Row[Any]) -> TokenClasses:
    return TokenClasses(**{name: int(row._mapping[name]) for name in TOKEN_CLASSES})
