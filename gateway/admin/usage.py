"""`/usage`, `/forecast`, `/margins`, `/operations`: who cost what, why, and what the month would come to."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated
from uuid import UUID

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, QueryParameter

from billing.breakdown import UsageRow, usage_by, usage_gap
from billing.explanation import Explanation, explain
from billing.filters import Filters
from billing.forecast import Forecast, forecast_month
from billing.gaps import Gap
from billing.margins import IdleLine, MarginLine, margins
from billing.people import MissingError
from billing.records import TokenClasses
from billing.reports import Within
from billing.tables.usage import CACHED_ANSWERS
from gateway.admin.access import needs
from gateway.admin.moments import period
from gateway.admin.writing import Admin

REPORT_SECONDS = 60.0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one combination of the dimensions came to, in one currency."""

    by: dict[str, str | None]
    """Dimension -> name, model, value, date or hour."""
    ids: dict[str, str | None]
    currency: str
    operations: int
    failed: int
    refused: int
    tokens: TokenClasses
    billed: Decimal | None
    """null: none of it is known."""
    billed_unknown: int
    """Operations that are not in `billed`."""
    billed_adjustment: Decimal
    cost: Decimal | None
    """null: none of it is known; of a member's report always."""
    cost_unknown: int | None
    cost_adjustment: Decimal | None
    margin: Decimal | None
    cached_answers: int
    """Operations whose answer came out of the response cache. Their own tokens are 0."""
    saved_prompt_tokens: int
    """Of the calls that those answers were made for."""
    saved_completion_tokens: int
    cached_answers_saved: Decimal
    """What those calls were billed more than the answers from the cache."""
    cached_answers_saved_unknown: int
    """Answers that are not in `cached_answers_saved`."""


class Report(msgspec.Struct, frozen=True):
    rows: list[Usage]
    gap: Gap | None
    """Days that retention has dropped: in no row."""


class Forecasts(msgspec.Struct, frozen=True):
    months: list[Forecast]
    """One for each currency."""


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None
    currency: str
    attempts: int
    billed: Decimal | None
    billed_unknown: int
    cost: Decimal | None
    cost_unknown: int
    idle_cost: Decimal
    margin: Decimal | None


class MarginReport(msgspec.Struct, frozen=True):
    lines: list[Margin]
    idle: list[IdleLine]
    gap: Gap | None
    """Days that retention has dropped: in no line, but for their idle time."""


By = Annotated[
    list[str], QueryParameter(name="by", description="user, team, org, key, model, day, hour or tag:NAME; repeat.")
]
Tag = Annotated[str | None, QueryParameter(name="tag", description="Only what is tagged so: NAME=VALUE.")]


def filters(
    admin: NamedDependency[Admin],
    org_id: FromQuery[UUID | None] = None,
    team_id: FromQuery[UUID | None] = None,
    user_id: FromQuery[UUID | None] = None,
    key_id: FromQuery[UUID | None] = None,
    model: FromQuery[str | None] = None,
    tag: Tag = None,
    currency: FromQuery[str | None] = None,
) -> Filters:
    """What a report is about, within what the caller may see."""
    name, equals, value = (tag or "").partition("=")
    if tag is not None and not (name and equals):
        raise ValueError(f"{tag!r} is not a tag; write it as name=value")
    return Filters(
        org_id=admin.org(org_id),
        team_id=team_id,
        user_id=admin.user(user_id),
        key_id=key_id,
        model=model,
        tag=None if tag is None else (name, value),
        currency=currency,
    )


@get("/usage", opt=needs("own"))
async def usage(
    admin: NamedDependency[Admin],
    filters: NamedDependency[Filters],
    start: FromQuery[datetime],
    end: FromQuery[datetime],
    by: By,
    time_zone: FromQuery[str] = "UTC",
) -> Report:
    """Sums over what began in [start, end). A member sees their own, without what it cost the operator."""
    first, last = period(start, end)
    async with admin.read(REPORT_SECONDS) as conn:
        rows = await usage_by(conn, by, first, last, filters, time_zone)
        lacks = await usage_gap(conn, by, first, last, filters)
    return Report([_usage(row, costs=admin.caller.may("read")) for row in rows], lacks)


@get("/forecast", opt=needs("read"))
async def forecast(
    admin: NamedDependency[Admin], filters: NamedDependency[Filters], time_zone: FromQuery[str] = "UTC"
) -> Forecasts:
    """What the month that runs would come to."""
    async with admin.read(REPORT_SECONDS) as conn:
        return Forecasts(await forecast_month(conn, filters, time_zone))


@get("/margins", opt=needs("read", everywhere=True))
async def margin_report(
    admin: NamedDependency[Admin],
    start: FromQuery[datetime],
    end: FromQuery[datetime],
    by: FromQuery[str] = "model",
    spread_idle: FromQuery[bool] = False,
) -> MarginReport:
    """What was billed less what it cost, with the devices' idle time on its own lines or spread over the others."""
    first, last = period(start, end)
    async with admin.read(REPORT_SECONDS) as conn:
        found = await margins(conn, first, last, by, spread_idle=spread_idle)
    return MarginReport([_margin(line) for line in found.lines], found.idle, found.gap)


@get("/operations/{operation_id:uuid}", opt=needs("read"))
async def explain_operation(admin: NamedDependency[Admin], operation_id: FromPath[UUID]) -> Explanation:
    """One operation: what each attempt used, at which prices, and what that comes to."""
    async with admin.read() as conn:
        found = await explain(conn, operation_id, within=Within(org_id=admin.caller.org_id))
    if found is None:
        raise MissingError(f"there is no operation {operation_id}")
    return found


ROUTES = [usage, forecast, margin_report, explain_operation]


def _usage(row: UsageRow, costs: bool) -> Usage:
    return Usage(
        by=dict(row.by),
        ids=dict(row.ids),
        currency=row.currency,
        operations=row.operations,
        failed=row.failed,
        refused=row.refused,
        tokens=row.tokens,
        billed=row.billed,
        billed_unknown=row.billed_unknown,
        billed_adjustment=row.billed_adjustment,
        cost=row.cost if costs else None,
        cost_unknown=row.cost_unknown if costs else None,
        cost_adjustment=row.cost_adjustment if costs else None,
        margin=row.margin if costs else None,
        **{name: getattr(row, name) for name in CACHED_ANSWERS},
    )


def _margin(line: MarginLine) -> Margin:
    return Margin(**msgspec.structs.asdict(line), margin=line.margin)
