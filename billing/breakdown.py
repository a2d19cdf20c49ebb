"""Who cost what: usage of a period, summed by user, team, org, key, model, tag, day or hour, or several of these.

Read from the rollups, and where a period or an hour is not whole there, from the ledger (`billing.usage_rows`): the
sums are the ledger's to the last digit either way. What no rollup holds (a tag by user, say) is read from the ledger.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
from sqlalchemy import ColumnElement, Row, Select, Subquery, func, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.charge import EXACT
from billing.filters import Filters
from billing.gaps import Gap, gap, gap_of_sums
from billing.ids import smallest_id
from billing.measures import ledger_rows, summed
from billing.records import TOKEN_CLASSES, TokenClasses
from billing.rollups import tag_rows
from billing.tables import api_key, app_user, operation, org, team
from billing.tables.usage import CACHED_ANSWERS
from billing.usage_rows import tag_usage_rows, usage_rows
from billing.windows import zone

DIMENSIONS = ("user", "team", "org", "key", "model", "day", "hour")
"""And tag:NAME, for any name."""

_ID_SLACK = timedelta(hours=1)  # an id may be made a little before or after `started_at` is read
_IN_TAG_ROLLUPS = {"org", "model", "day", "hour"}

_NAMED = {"user": (app_user, "user_id"), "team": (team, "team_id"), "org": (org, "org_id"), "key": (api_key, "key_id")}


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one combination of the dimensions came to, in one currency. A sum is None when none of it is known."""

    by: Mapping[str, str | None]
    """Dimension -> name, model, value, date or hour. None: operations that have no user, team or model."""
    ids: Mapping[str, str | None]
    """Of users, teams, orgs and keys."""
    currency: str
    operations: int
    failed: int
    """Ended in `upstream_error`."""
    refused: int
    tokens: TokenClasses
    """Of all attempts, also of those that the caller does not pay."""
    billed: Decimal | None
    """Adjustments counted in."""
    billed_unknown: int
    """Operations that are not in `billed`."""
    cost: Decimal | None
    cost_unknown: int
    margin: Decimal | None
    """Billed less cost, over the operations that have both."""
    billed_adjustment: Decimal
    """What corrected prices changed; it is in `billed`."""
    cost_adjustment: Decimal
    cached_answers: int = 0
    """Operations whose answer came out of the response cache. Their own tokens are 0."""
    saved_prompt_tokens: int = 0
    """Of the calls that those answers were made for, as is `saved_completion_tokens`."""
    saved_completion_tokens: int = 0
    cached_answers_saved: Decimal = Decimal(0)
    """What those calls were billed more than the answers from the cache."""
    cached_answers_saved_unknown: int = 0
    """Answers that are not in `cached_answers_saved`."""

    @property
    def margin_share(self) -> Decimal | None:
        """Of what was billed, over the operations that have both amounts; None where that cannot be told apart."""
        if self.margin is None or self.billed is None or self.cost is None:
            return None
        if not self.cost_unknown:
            base = self.billed
        elif not self.billed_unknown:
            base = EXACT.add(self.margin, self.cost)
        else:
            return None
        return self.margin / base if base else None

    @property
    def cached_share(self) -> Decimal | None:
        """Of the prompt tokens; None without any."""
        prompt = self.tokens.prompt_tokens
        return Decimal(self.tokens.input_cached) / prompt if prompt else None


async def usage_by(
    conn: AsyncConnection,
    dimensions: Sequence[str],
    start: datetime,
    end: datetime,
    filters: Filters = Filters(),  # noqa: B008 - frozen
    time_zone: str = "UTC",
    *,
    only: ColumnElement[bool] | None = None,
) -> list[UsageRow]:
    """Sums over the operations that started in [start, end), one row a combination and currency.

    By day or hour in time order, else those that were billed most first. By a tag, only operations that carry it.
    `only`: which count, by `operation`'s columns; these are read from the ledger, since no sums tell them apart. Raises
    ValueError on an unknown dimension, time zone or an empty period.
    """
    tz = zone(time_zone)
    _check(dimensions, start, end)
    rows = await _source(conn, dimensions, start, end, filters, tz, only)
    keys = {name: _key(rows, name, time_zone).label(f"d{i}") for i, name in enumerate(dimensions)}
    sums = (
        select(*keys.values(), rows.c.currency, *summed(rows))
        .where(*_conditions(rows, filters))
        .group_by(*keys.values(), rows.c.currency)
        .subquery("sums")
    )
    found = [_row(row, dimensions, tz) for row in await conn.execute(_with_names(sums, dimensions))]
    timed = [name for name in dimensions if name in ("day", "hour")]
    biggest_first = sorted(
        found, key=lambda row: (row.billed is None, -(row.billed or 0), -row.operations, *map(str, row.by.values()))
    )
    return sorted(biggest_first, key=lambda row: [row.by[name] or "" for name in timed])


async def tag_names(conn: AsyncConnection, start: datetime, end: datetime, filters: Filters, limit: int) -> list[str]:
    """Names of the tags that most of the operations carry which started in [start, end), the commonest first."""
    if filters.tag is None and _summed(["any"], ["tag:any"], filters):
        rows = await tag_usage_rows(conn, start, end)
        query = select(rows.c.name, rows.c.operations).where(*_conditions(rows, filters))
    else:
        found = ledger_rows(_in_ledger(start, end), ["operations"])
        named, _ = tag_rows(found, found.c.operations)
        query = named.where(*_conditions(found, filters))
    carried = query.subquery("carried")
    total = func.sum(carried.c.operations)
    names = select(carried.c.name).group_by(carried.c.name).order_by(total.desc(), carried.c.name).limit(limit)
    return list((await conn.execute(names)).scalars())


async def usage_gap(
    conn: AsyncConnection,
    dimensions: Sequence[str],
    start: datetime,
    end: datetime,
    filters: Filters = Filters(),  # noqa: B008 - frozen
) -> Gap | None:
    """What retention has taken from what `usage_by` says of the same; None: nothing."""
    if _summed(_tags(dimensions, filters), dimensions, filters):
        return await gap_of_sums(conn, start, end)
    return await gap(conn, start, end, filters)


def _check(dimensions: Sequence[str], start: datetime, end: datetime) -> None:
    for name in dimensions:
        if name not in DIMENSIONS and not (name.startswith("tag:") and name != "tag:"):
            raise ValueError(f"usage cannot be shown by {name!r}; use {', '.join(DIMENSIONS)} or tag:NAME")
    if len(set(dimensions)) < len(dimensions):
        raise ValueError("the same dimension is asked for twice")
    if start >= end:
        raise ValueError(f"the period is empty: it begins at {start.isoformat()} and ends at {end.isoformat()}")


async def _source(
    conn: AsyncConnection,
    dimensions: Sequence[str],
    start: datetime,
    end: datetime,
    filters: Filters,
    tz: ZoneInfo,
    only: ColumnElement[bool] | None,
) -> Subquery:
    tags = _tags(dimensions, filters)
    cuts = list(_cuts(dimensions, start, end, tz))
    step: Any = "hour" if "hour" in dimensions else "day"
    if only is None and not tags:
        return await usage_rows(conn, start, end, cuts=cuts, step=step)
    if only is None and _summed(tags, dimensions, filters):
        rows = await tag_usage_rows(conn, start, end, cuts=cuts, step=step)
        return select(rows).where(rows.c.name == tags[0]).subquery("tagged")
    which = _in_ledger(start, end) if only is None else _in_ledger(start, end) & only
    for name in tags:
        which &= operation.c.tags.has_key(name)
    return ledger_rows(which)


def _in_ledger(start: datetime, end: datetime) -> ColumnElement[bool]:
    started, identifier = operation.c.started_at, operation.c.id
    ids = (identifier >= smallest_id(start - _ID_SLACK)) & (identifier < smallest_id(end + _ID_SLACK))
    return (started >= start) & (started < end) & ids


def _tags(dimensions: Sequence[str], filters: Filters) -> list[str]:
    """The names of those that it is about."""
    names = [name.removeprefix("tag:") for name in dimensions if name.startswith("tag:")]
    return names if filters.tag is None else [*names, filters.tag[0]]


def _summed(tags: Sequence[str], dimensions: Sequence[str], filters: Filters) -> bool:
    """Whether the rollups have it."""
    plain = {name for name in dimensions if not name.startswith("tag:")} <= _IN_TAG_ROLLUPS
    of_one = len(set(tags)) == 1 and plain and not (filters.team_id or filters.user_id or filters.key_id)
    return not tags or of_one


def _cuts(dimensions: Sequence[str], start: datetime, end: datetime, tz: ZoneInfo) -> Iterator[datetime]:
    """Edges of local days, and of local hours where they are none of UTC."""
    if "day" in dimensions or "hour" in dimensions:
        day = start.astimezone(tz).date()
        while (at := _midnight(day, tz)) < end:
            if at > start:
                yield at
            day += timedelta(days=1)
    if "hour" in dimensions:
        at = start.astimezone(UTC).replace(minute=0, second=0, microsecond=0)
        while at < end:
            local = at.astimezone(tz)
            if local.minute:
                yield at + timedelta(minutes=60 - local.minute)
            at += timedelta(hours=1)


def _midnight(day: date, tz: ZoneInfo) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=tz).astimezone(UTC)


def _key(rows: Subquery, name: str, time_zone: str) -> ColumnElement[Any]:
    if name.startswith("tag:"):
        return rows.c.value if "value" in rows.c else rows.c.tags[name.removeprefix("tag:")].astext
    if name in ("day", "hour"):
        # Written into the SQL: as two parameters, SELECT and GROUP BY would not match.
        written = [literal(each, literal_execute=True) for each in (name, time_zone)]
        return func.date_trunc(written[0], rows.c.at, written[1])
    return rows.c.model if name == "model" else rows.c[_NAMED[name][1]]


def _conditions(rows: Subquery, filters: Filters) -> Iterator[ColumnElement[bool]]:
    for name in ("org_id", "team_id", "user_id", "key_id", "model", "currency"):
        if (wanted := getattr(filters, name)) is not None:
            yield rows.c[name] == wanted
    if filters.tag is not None:
        name, value = filters.tag
        yield (rows.c.value if "value" in rows.c else rows.c.tags[name].astext) == value


def _with_names(sums: Subquery, dimensions: Sequence[str]) -> Select[*tuple[Any, ...]]:
    query = select(sums)
    for i, name in enumerate(dimensions):
        if name in _NAMED:
            table = _NAMED[name][0].alias(f"n{i}")
            query = query.add_columns(table.c.name.label(f"n{i}")).outerjoin(table, table.c.id == sums.c[f"d{i}"])
    return query


def _row(row: Row[Any], dimensions: Sequence[str], tz: ZoneInfo) -> UsageRow:
    values: dict[str, Any] = dict(row._mapping)
    by: dict[str, str | None] = {}
    ids: dict[str, str | None] = {}
    for i, name in enumerate(dimensions):
        value = values[f"d{i}"]
        if name in _NAMED:
            ids[name] = None if value is None else str(value)
            by[name] = values[f"n{i}"] or ids[name]
        elif name in ("day", "hour"):
            local = value.astimezone(tz)
            by[name] = f"{local:%Y-%m-%d}" if name == "day" else local.isoformat(timespec="minutes")
        else:
            by[name] = value or None
    margin = values["margin"]
    if margin is None and not (values["billed_unknown"] or values["cost_unknown"]):
        margin = Decimal(0)
    return UsageRow(
        by=by,
        ids=ids,
        currency=values["currency"],
        operations=values["operations"],
        failed=values["failed"],
        refused=values["refused"],
        billed=_known(values, "billed"),
        billed_unknown=values["billed_unknown"],
        cost=_known(values, "cost"),
        cost_unknown=values["cost_unknown"],
        tokens=TokenClasses(**{name: int(values[name]) for name in TOKEN_CLASSES}),
        margin=margin,
        billed_adjustment=values["billed_adjustment"],
        cost_adjustment=values["cost_adjustment"],
        **{name: values[name] for name in CACHED_ANSWERS},
    )


def _known(values: Mapping[str, Any], name: str) -> Decimal | None:
    """The sum with what was adjusted; None where nothing of it is known, 0 where there was nothing to know."""
    amount: Decimal | None = values[name]
    adjustment: Decimal = values[f"{name}_adjustment"]
    if amount is None:
        return adjustment if adjustment or not values[f"{name}_unknown"] else None
    return EXACT.add(amount, adjustment)
