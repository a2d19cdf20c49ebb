"""Measures of any period, to be summed: whole days and hours from the rollups, the rest from the ledger itself.

The rest is hours that have changed since they were summed up (most often the running one) and those that an edge of
the period cuts. So what is read is always what the ledger says, however long ago the rollups were made.
"""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, Select, Subquery, Table, false, select, text, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.measures import ledger_rows
from billing.rollups import DAY, HOUR, in_hours, stale_hours, tag_rows
from billing.tables import operation, usage_day, usage_day_tag, usage_hour, usage_hour_tag
from billing.tables.usage import MEASURES, OWNERS, TAGS

Step = Literal["hour", "day"]

_NO_JIT = text("SET LOCAL jit = off")  # PostgreSQL takes such sums for long ones, and compiling them takes longer


async def usage_rows(
    connection: AsyncConnection,
    start: datetime,
    end: datetime | None = None,
    *,
    cuts: Collection[datetime] = (),
    step: Step = "day",
    measures: Collection[str] = MEASURES,
) -> Subquery:
    """Rows of the operations that started from `start` on and before `end`: `at`, OWNERS, `measures`.

    `at` is when the operation started, or the UTC hour or (with step "day") the UTC day that a row sums up. No row
    reaches over one of `cuts`, so that `at >= cut` is exact. Add up; one owner has many rows.
    """
    return await _rows(connection, start, end, cuts, step, measures, usage_hour, usage_day)


async def tag_usage_rows(
    connection: AsyncConnection,
    start: datetime,
    end: datetime | None = None,
    *,
    cuts: Collection[datetime] = (),
    step: Step = "day",
) -> Subquery:
    """The same once for each tag of each operation: `at`, TAGS (its `name` and `value` among them), MEASURES."""
    return await _rows(connection, start, end, cuts, step, MEASURES, usage_hour_tag, usage_day_tag)


async def _rows(
    connection: AsyncConnection,
    start: datetime,
    end: datetime | None,
    cuts: Collection[datetime],
    step: Step,
    measures: Collection[str],
    hourly: Table,
    daily: Table,
) -> Subquery:
    await connection.execute(_NO_JIT)
    wanted = [name for name in MEASURES if name in measures]
    edges = [each.astimezone(UTC) for each in (start, *cuts, *([] if end is None else [end]))]
    stale = [hour for hour in await stale_hours(connection) if hour > start - HOUR and (end is None or hour < end)]
    hours = sorted({*stale, *(floor(edge, "hour") for edge in edges if edge != floor(edge, "hour"))})
    days = {floor(hour, "day") for hour in hours} | {floor(e, "day") for e in edges if e != floor(e, "day")}
    # What retention has dropped from the ledger is nowhere else.
    within = [hourly.c.bucket >= start, hourly.c.bucket.not_in(hours) | hourly.c.dropped.is_not(None)]
    if end is not None:
        within.append(hourly.c.bucket < end)
    if step == "day":
        within.append(in_hours(hourly.c.bucket, hours_of(days)) if days else false())
    parts = [_sums(hourly, wanted, within)]
    if hours:
        parts.append(_ledger(hourly, wanted, hours, start, end))
    if step == "day":
        whole = [daily.c.bucket >= start, daily.c.bucket.not_in(days)]
        if end is not None:
            whole.append(daily.c.bucket < end)
        parts.append(_sums(daily, wanted, whole))
    return union_all(*parts).subquery("usage_rows")


def floor(moment: datetime, step: Step) -> datetime:
    """Start of the UTC hour or day of a moment in UTC."""
    hour = moment.replace(minute=0, second=0, microsecond=0)
    return hour if step == "hour" else hour.replace(hour=0)


def hours_of(days: Collection[datetime]) -> list[datetime]:
    return [day + n * HOUR for day in sorted(days) for n in range(DAY // HOUR)]


def _sums(table: Table, wanted: Sequence[str], which: Sequence[ColumnElement[bool]]) -> Select[*tuple[Any, ...]]:
    names = [*(TAGS if "value" in table.c else OWNERS), *wanted]
    return select(table.c.bucket.label("at"), *(table.c[name] for name in names)).where(*which)


def _ledger(
    table: Table, wanted: Sequence[str], hours: Sequence[datetime], start: datetime, end: datetime | None
) -> Select[*tuple[Any, ...]]:
    started = operation.c.started_at
    which = in_hours(started, hours) & (started >= start)
    rows = ledger_rows(which if end is None else which & (started < end), wanted)
    measures = [rows.c[name] for name in wanted]
    if "value" in table.c:
        query, _ = tag_rows(rows, rows.c.at)
        return query.add_columns(*measures)
    return select(rows.c.at, *(rows.c[name] for name in OWNERS), *measures)
