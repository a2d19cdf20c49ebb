"""Sums of the ledger per hour and day, by owner and by tag, computed again for the hours that have changed.

A trigger notes the hour of every operation that lands, in the same transaction (`usage_stale`); a row that is late, and
an adjustment of an old one, mark their hour like any other. So the window that is recomputed is what has changed: an
hour without a mark is exact, and one with a mark is read from the ledger by whoever asks (`billing.usage_rows`).
Recomputing replaces an hour's rows, so it can be repeated and cut off anywhere.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Date,
    Select,
    Subquery,
    Table,
    and_,
    delete,
    false,
    func,
    literal,
    literal_column,
    or_,
    select,
    text,
    true,
)
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.measures import ledger_rows, summed
from billing.partitions import ensure_partition, give_way
from billing.tables import operation, usage_day, usage_day_tag, usage_hour, usage_hour_tag, usage_stale
from billing.tables.usage import MEASURES, OWNERS, TAGS

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
EVERY_SECONDS = 60.0
HOURS_AT_ONCE = 24
"""In one transaction."""
TAG_CHARACTERS = 256
"""Of a tag's value; the user that a request's body names may be longer."""

_ROOM = text("SET LOCAL work_mem = '64MB'")  # for a day's groups, which else go to the disk
_LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended('farthing rollups', 0))")
_NONE: ColumnElement[bool] = false()
_BY_HOUR = {usage_hour: OWNERS, usage_hour_tag: TAGS}
_BY_DAY = {usage_day: usage_hour, usage_day_tag: usage_hour_tag}


async def refresh(engine: AsyncEngine) -> None:
    """Recompute every hour that is marked by now, and its day."""
    async with engine.connect() as conn:
        hours = await stale_hours(conn)
    for start in range(0, len(hours), HOURS_AT_ONCE):
        some = hours[start : start + HOURS_AT_ONCE]
        async with engine.begin() as conn:
            await give_way(conn)
            for day in sorted({hour.date() for hour in some}):
                for table in (*_BY_HOUR, *_BY_DAY):
                    await ensure_partition(conn, table.name, day)
        async with engine.begin() as conn:
            await recompute(conn, some)


async def stale_hours(conn: AsyncConnection) -> list[datetime]:
    """The hours whose sums are out of date, in UTC, in order."""
    marked = select(usage_stale.c.bucket).distinct().order_by(usage_stale.c.bucket)
    return [bucket.astimezone(UTC) for bucket in (await conn.execute(marked)).scalars()]


async def recompute(conn: AsyncConnection, hours: Sequence[datetime], without: ColumnElement[bool] = _NONE) -> None:
    """Replace the sums of these hours and of their days by what the ledger holds now. `hours` are full ones, in UTC.

    `without`: operations that are as good as gone. What was laid aside stays. Takes turns with whoever else recomputes,
    until the caller's transaction ends.
    """
    await conn.execute(_LOCK)
    await conn.execute(_ROOM)
    # First, so that whatever is marked from here on stays marked, whether the sums below see it or not.
    await conn.execute(delete(usage_stale).where(usage_stale.c.bucket.in_(hours)))
    for table in _BY_HOUR:
        await conn.execute(delete(table).where(table.c.bucket.in_(hours), table.c.dropped.is_(None)))
        await conn.execute(_fill(table, in_hours(operation.c.started_at, hours) & ~without))
    days = sorted({hour.replace(hour=0) for hour in hours})
    for table, hourly in _BY_DAY.items():
        await conn.execute(delete(table).where(table.c.bucket.in_(days)))
        await conn.execute(_fill_days(table, hourly, days))


async def lay_aside(conn: AsyncConnection, day: date, which: ColumnElement[bool]) -> None:
    """Keep apart, as of the ledger's `day`, what the operations came to that `which` says: they are about to go.

    Takes turns as `recompute` does.
    """
    await conn.execute(_LOCK)
    hour = _start("hour", operation.c.started_at).label("hour")
    found = await conn.execute(select(hour).where(which).distinct().order_by(hour))
    hours = [each.astimezone(UTC) for each in found.scalars()]
    for table in _BY_HOUR:
        query = _fill(table, which, day)
        more = {name: _added(table.c[name], query.excluded[name]) for name in MEASURES}
        await conn.execute(query.on_conflict_do_update(constraint=f"uq_{table.name}", set_=more))
    if hours:
        await recompute(conn, hours, which)


def _added(one: ColumnElement[Any], other: ColumnElement[Any]) -> ColumnElement[Any]:
    """The sum of two of which either may be NULL."""
    return func.coalesce(one + other, one, other)


def _fill(table: Table, which: ColumnElement[bool], dropped: date | None = None) -> Insert:
    """INSERT of the hourly sums of the operations that `which` says into `usage_hour` or `usage_hour_tag`."""
    rows = ledger_rows(which)
    bucket = _start("hour", rows.c.at).label("bucket")
    query: Select[*tuple[Any, ...]]
    if table is usage_hour_tag:
        query, about = tag_rows(rows, bucket)
    else:
        about = [rows.c[name] for name in OWNERS]
        query = select(bucket, *about)
    query = query.add_columns(literal(dropped, Date), *summed(rows)).group_by(literal_column("1"), *about)
    return insert(table).from_select(["bucket", *_BY_HOUR[table], "dropped", *MEASURES], query)


def tag_rows(rows: Subquery, *columns: ColumnElement[Any]) -> tuple[Select[*tuple[Any, ...]], list[ColumnElement[Any]]]:
    """`columns` and TAGS, once for each tag of each of `rows`; and the expressions of TAGS, to group by."""
    tag = func.jsonb_each_text(rows.c.tags).table_valued("key", "value").lateral("tag")
    value = func.left(tag.c.value, literal_column(str(TAG_CHARACTERS)))
    about = [rows.c.org_id, tag.c.key, value, rows.c.model, rows.c.currency]
    named = [each.label(name) for each, name in zip(about, TAGS, strict=True)]
    return select(*columns, *named).select_from(rows).join(tag, true()), about


def in_hours(column: ColumnElement[datetime], hours: Iterable[datetime]) -> ColumnElement[bool]:
    """Whether `column` lies in one of `hours`, which are in order: as few ranges of it as say so."""
    spans: list[tuple[datetime, datetime]] = []
    for hour in hours:
        if spans and spans[-1][1] == hour:
            spans[-1] = spans[-1][0], hour + HOUR
        else:
            spans.append((hour, hour + HOUR))
    return or_(*(and_(column >= start, column < end) for start, end in spans))


def _fill_days(table: Table, hourly: Table, days: Sequence[datetime]) -> Any:
    bucket = _start("day", hourly.c.bucket).label("bucket")
    about = [hourly.c[name] for name in _BY_HOUR[hourly]]
    within = or_(*(and_(hourly.c.bucket >= day, hourly.c.bucket < day + DAY) for day in days))
    query = select(bucket, *about, *summed(hourly)).where(within).group_by(literal_column("1"), *about)
    return insert(table).from_select(["bucket", *(each.name for each in about), *MEASURES], query)


def _start(step: str, column: ColumnElement[Any]) -> ColumnElement[datetime]:
    return func.date_trunc(literal_column(f"'{step}'"), column, literal_column("'UTC'"))
