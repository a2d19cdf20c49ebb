"""Single operations: the newest of them, those before and after one, and everything about one. Reads only."""

from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement, Row, Select, case, func, select, true, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.measures import changed_by
from billing.prices import Price, find_versions
from billing.records import NO_COLUMNS, AttemptRecord, CachedAnswer, OperationRecord, TokenClasses
from billing.reports import EVERYTHING, Within, read_tokens, token_sums
from billing.tables import adjustment, api_key, app_user, attempt, operation, org, team

_ORDER = (operation.c.started_at, operation.c.id)


class OperationSummary(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    started_at: datetime
    user: str | None
    key_name: str | None
    key_prefix: str | None
    requested_model: str
    model: str | None
    status: str
    http_status: int
    tokens: TokenClasses
    billed: Decimal | None
    """Adjustments counted in, as in `cost`."""
    cost: Decimal | None
    billed_delta: Decimal | None
    """What later corrections of prices changed `billed` by; None: nothing."""
    cost_delta: Decimal | None
    from_cache: bool
    """The answer came out of the response cache."""
    currency: str
    ttft_seconds: float | None
    """To the first token that was sent; where the answer was not streamed, to the first that was made."""
    total_seconds: float


class OperationPage(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[OperationSummary]
    """Newest first."""
    newer: bool
    """Whether there are newer ones."""
    older: bool


class OperationDetail(msgspec.Struct, frozen=True, kw_only=True):
    record: OperationRecord
    recorded_at: datetime
    org: str | None
    team: str | None
    user: str | None
    key_name: str | None
    key_prefix: str | None
    prices: dict[UUID, Price]
    """Every price version that an attempt names, or the operation itself as an answer from the response cache."""


async def latest_operations(
    connection: AsyncConnection, limit: int = 100, *, within: Within = EVERYTHING
) -> list[OperationSummary]:
    """The newest operations with the tokens of all their attempts and their adjustments, newest first."""
    newest = within.of(select(operation), operation).order_by(*(each.desc() for each in _ORDER))
    return await _summaries(connection, newest.limit(limit))


async def operations_before(
    connection: AsyncConnection, cursor: UUID, limit: int, *, within: Within = EVERYTHING
) -> OperationPage | None:
    """The newest ones of those that started before the operation `cursor`; None when that is none, or not `within`."""
    bound = await _bound(connection, cursor, within)
    if bound is None:
        return None
    earlier = within.of(select(operation), operation).where(operation.c.started_at <= bound[0], tuple_(*_ORDER) < bound)
    found = await _summaries(connection, earlier.order_by(*(each.desc() for each in _ORDER)).limit(limit + 1))
    return OperationPage(rows=found[:limit], newer=True, older=len(found) > limit)


async def operations_after(
    connection: AsyncConnection, cursor: UUID, limit: int, *, within: Within = EVERYTHING
) -> OperationPage | None:
    """The oldest ones of those that started after the operation `cursor`; None when that is none, or not `within`."""
    bound = await _bound(connection, cursor, within)
    if bound is None:
        return None
    later = within.of(select(operation), operation).where(operation.c.started_at >= bound[0], tuple_(*_ORDER) > bound)
    found = await _summaries(connection, later.order_by(*_ORDER).limit(limit + 1))
    return OperationPage(rows=found[-limit:], newer=len(found) > limit, older=True)


async def _bound(connection: AsyncConnection, cursor: UUID, within: Within) -> tuple[datetime, UUID] | None:
    query = within.of(select(operation.c.started_at).where(operation.c.id == cursor), operation)
    started_at = (await connection.execute(query)).scalar_one_or_none()
    return None if started_at is None else (started_at, cursor)


async def _summaries(connection: AsyncConnection, which: Select[*tuple[Any, ...]]) -> list[OperationSummary]:
    """Of the operations that `which` selects, newest first."""
    latest = which.subquery()
    began = func.extract("epoch", attempt.c.started_at - latest.c.started_at)
    first = func.min(began + attempt.c.ttft_seconds).label("first_token")
    tokens = (
        select(*token_sums(attempt), first, *_costs_apart())
        .where(attempt.c.operation_id == latest.c.id)
        .lateral("tokens")
    )
    deltas = (func.sum(adjustment.c[name]).label(name) for name in ("billed_delta", "cost_delta"))
    changes = select(*deltas).where(adjustment.c.operation_id == latest.c.id).lateral("changes")
    # What an operation cost is known once the cost of each of its attempts is.
    cost_delta = case((latest.c.cost.is_not(None) | ~tokens.c.lacking, changes.c.cost_delta))
    cost = func.coalesce(latest.c.cost, case((cost_delta.is_not(None), tokens.c.costs)))
    query = (
        select(latest, tokens, app_user.c.name.label("user"), api_key.c.name.label("key_name"), api_key.c.prefix)
        .add_columns(
            changes.c.billed_delta,
            cost_delta.label("known_cost_delta"),
            changed_by(latest.c.billed, changes.c.billed_delta).label("billed_now"),
            changed_by(cost, cost_delta).label("cost_now"),
        )
        .select_from(latest)
        .join(tokens, true())
        .join(changes, true())
        .outerjoin(app_user, app_user.c.id == latest.c.user_id)
        .outerjoin(api_key, api_key.c.id == latest.c.key_id)
        .order_by(latest.c.started_at.desc(), latest.c.id.desc())
    )
    return [
        OperationSummary(
            id=row.id,
            started_at=row.started_at,
            user=row.user,
            key_name=row.key_name,
            key_prefix=row.prefix,
            requested_model=row.requested_model,
            model=row.model,
            status=row.status,
            http_status=row.http_status,
            tokens=read_tokens(row),
            billed=row.billed_now,
            cost=row.cost_now,
            billed_delta=row.billed_delta,
            cost_delta=row.known_cost_delta,
            from_cache=row.cached_from is not None,
            currency=row.currency,
            ttft_seconds=row.first_token if row.ttft_seconds is None else row.ttft_seconds,
            total_seconds=row.total_seconds,
        )
        for row in await connection.execute(query)
    ]


def _costs_apart() -> list[ColumnElement[Any]]:
    """The sum of what attempts were recorded to cost, and whether one's cost is unknown and no adjustment's."""
    same = (adjustment.c.operation_id == attempt.c.operation_id) & (adjustment.c.number == attempt.c.number)
    corrected = select(adjustment.c.id).where(same, adjustment.c.cost_delta.is_not(None)).exists()
    lacking = func.bool_or(attempt.c.cost.is_(None) & ~corrected)
    return [func.sum(attempt.c.cost).label("costs"), lacking.label("lacking")]


async def find_operation(
    connection: AsyncConnection, operation_id: UUID, *, within: Within = EVERYTHING
) -> OperationDetail | None:
    """One operation with its attempts and the prices they name; None when there is no such id, or not `within`."""
    names = (
        select(
            operation,
            org.c.name.label("org_name"),
            team.c.name.label("team_name"),
            app_user.c.name.label("user_name"),
            api_key.c.name.label("key_name"),
            api_key.c.prefix.label("key_prefix"),
        )
        .select_from(operation)
        .outerjoin(org, org.c.id == operation.c.org_id)
        .outerjoin(team, team.c.id == operation.c.team_id)
        .outerjoin(app_user, app_user.c.id == operation.c.user_id)
        .outerjoin(api_key, api_key.c.id == operation.c.key_id)
        .where(operation.c.id == operation_id)
    )
    row = (await connection.execute(within.of(names, operation))).one_or_none()
    if row is None:
        return None
    by_number = select(attempt).where(attempt.c.operation_id == operation_id).order_by(attempt.c.number)
    attempts = [_attempt(each) for each in await connection.execute(by_number)]
    own = {name: row._mapping[name] for name in OperationRecord.__struct_fields__ if name not in NO_COLUMNS}
    record = OperationRecord(**own, attempts=attempts, cached=_cached(row))
    return OperationDetail(
        record=record,
        recorded_at=row.recorded_at,
        org=row.org_name,
        team=row.team_name,
        user=row.user_name,
        key_name=row.key_name,
        key_prefix=row.key_prefix,
        prices=await _prices(connection, record),
    )


def _cached(row: Row[Any]) -> CachedAnswer | None:
    if row.cached_from is None:
        return None
    return CachedAnswer(**{name: row._mapping[name] for name in CachedAnswer.__struct_fields__})


async def _prices(connection: AsyncConnection, record: OperationRecord) -> dict[UUID, Price]:
    named = ("price_version_id", "price_override_id", "cost_version_id")
    naming = [*record.attempts, record.cached]
    wanted = {version for one in naming for name in named if (version := getattr(one, name, None)) is not None}
    return await find_versions(connection, wanted)


def _attempt(row: Row[Any]) -> AttemptRecord:
    own = {name: row._mapping[name] for name in AttemptRecord.__struct_fields__ if name != "tokens"}
    return AttemptRecord(**own, tokens=read_tokens(row))
