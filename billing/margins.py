"""What each model, user or scenario brought in and cost, with the idle time of one's own devices beside or inside it.

What requests cost on an own device is their device time at its price; nobody asked for the rest of the bill, the idle
time. It is a line of its own, or spread over who used the device in the period, by device time: then the costs of all
lines add up to the bill.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import (
    ColumnElement,
    Double,
    FromClause,
    Row,
    Select,
    Subquery,
    Text,
    and_,
    func,
    literal_column,
    null,
    select,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.charge import DEVICE_COST_QUANTUM, EXACT, total
from billing.devices import device_hours
from billing.gaps import Gap, gap
from billing.ids import smallest_id
from billing.records import CACHED_ANSWER_NUMBER
from billing.tables import adjustment, api_key, app_user, attempt, operation, org, team

GROUPS = ("model", "upstream", "org", "team", "user", "key")
"""What lines can be by; besides, `tag:NAME`, as in `tag:scenario`."""

_ID_SLACK = timedelta(hours=1)  # an id may be made a little before or after `started_at` is read
_SHARES = Context(prec=60, rounding=ROUND_HALF_EVEN)
_NAMED = {"org": org, "team": team, "user": app_user, "key": api_key}


class MarginLine(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over attempts, adjustments included. A sum is None when none of it is known.

    An answer from the response cache counts as an attempt, on no upstream.
    """

    name: str | None
    """Of the model, user, …; None: those that have none."""
    currency: str
    attempts: int
    billed: Decimal | None
    billed_unknown: int
    """Attempts that are not in `billed` because their charge is unknown."""
    cost: Decimal | None
    """Without idle time."""
    cost_unknown: int
    idle_cost: Decimal = Decimal(0)
    """Its share of the devices' idle time, where that is spread."""

    @property
    def margin(self) -> Decimal | None:
        """Billed less all cost; None when some of either is unknown."""
        if self.billed is None or self.cost is None or self.billed_unknown or self.cost_unknown:
            return None
        return EXACT.subtract(self.billed, EXACT.add(self.cost, self.idle_cost))


class IdleLine(msgspec.Struct, frozen=True, kw_only=True):
    """A device's idle time that is in no other line."""

    upstream: str
    currency: str
    seconds: Decimal
    cost: Decimal | None
    """None: some of it had no price."""


class Margins(msgspec.Struct, frozen=True, kw_only=True):
    lines: list[MarginLine]
    """Those that were billed most first."""
    idle: list[IdleLine]
    gap: Gap | None
    """Days that are in no line, but for their idle time."""


async def margins(
    conn: AsyncConnection, start: datetime, end: datetime, by: str, *, spread_idle: bool = False
) -> Margins:
    """Of the operations that started in [start, end), and the device hours that begin in it.

    `spread_idle`: idle time of known cost, of a device that anybody used, goes into the lines. Raises ValueError for a
    `by` that is neither of GROUPS nor `tag:NAME`.
    """
    rows = (await conn.execute(_sums(start, end, by))).all()
    idle = _idle(await device_hours(conn, start, end))
    shares: dict[tuple[str | None, str], Decimal] = {}
    if spread_idle:
        for line in idle:
            shares = _spread(line, rows, shares)
        used = {(row.upstream, row.currency) for row in rows if row.seconds}
        idle = [line for line in idle if line.cost is None or (line.upstream, line.currency) not in used]
    return Margins(lines=_lines(rows, shares), idle=idle, gap=await gap(conn, start, end))


def _sums(start: datetime, end: datetime, by: str) -> Select[Any]:
    ids = smallest_id(start - _ID_SLACK), smallest_id(end + _ID_SLACK)
    paid = _paid(*ids)
    name, source = _name(by, paid)
    adjusted = (
        select(
            adjustment.c.operation_id,
            adjustment.c.number,
            func.sum(adjustment.c.billed_delta).label("billed"),
            func.sum(adjustment.c.cost_delta).label("cost"),
        )
        .where(adjustment.c.started_at >= start, adjustment.c.started_at < end)
        .group_by(adjustment.c.operation_id, adjustment.c.number)
        .subquery()
    )
    same = and_(adjusted.c.operation_id == paid.c.operation_id, adjusted.c.number == paid.c.number)
    columns: list[ColumnElement[Any]] = [func.count().label("attempts")]
    for amount in ("billed", "cost"):
        unknown = and_(paid.c[amount].is_(None), adjusted.c[amount].is_(None))
        known = func.coalesce(paid.c[amount], 0) + func.coalesce(adjusted.c[amount], 0)
        columns.append(func.sum(known).filter(~unknown).label(amount))
        columns.append(func.count().filter(unknown).label(f"{amount}_unknown"))
    columns.append(func.coalesce(func.sum(paid.c.seconds), 0).label("seconds"))
    groups = (name.label("name"), operation.c.currency, paid.c.upstream)
    return (
        select(*groups, *columns)
        .select_from(source.join(paid, paid.c.operation_id == operation.c.id).outerjoin(adjusted, same))
        .where(
            operation.c.id >= ids[0],
            operation.c.id < ids[1],
            operation.c.started_at >= start,
            operation.c.started_at < end,
        )
        .group_by(*groups)
    )


def _paid(first: UUID, after: UUID) -> Subquery:
    """Attempts of the operations with these ids, and answers from the response cache in the same form."""
    named = [attempt.c[name] for name in ("operation_id", "number", "upstream", "billed", "cost")]
    seconds = attempt.c.prefill_device_seconds + attempt.c.decode_device_seconds
    attempts = select(*named, seconds.label("seconds"))
    again = select(
        operation.c.id,
        literal_column(str(CACHED_ANSWER_NUMBER)),
        null().cast(Text),
        operation.c.billed,
        operation.c.cost,
        null().cast(Double),
    ).where(operation.c.cached_from.is_not(None), operation.c.id >= first, operation.c.id < after)
    within = attempt.c.operation_id >= first, attempt.c.operation_id < after
    return union_all(attempts.where(*within), again).subquery("paid")


def _name(by: str, paid: Subquery) -> tuple[ColumnElement[Any], FromClause]:
    """What lines are named by, and where from."""
    if by == "model":
        return operation.c.model, operation
    if by == "upstream":
        return paid.c.upstream, operation
    if by in _NAMED:
        table = _NAMED[by]
        return table.c.name, operation.outerjoin(table, table.c.id == operation.c[f"{by}_id"])
    kind, _, tag = by.partition(":")
    if kind == "tag" and tag:
        return operation.c.tags[tag].astext, operation
    raise ValueError(f"{by!r} is nothing that margins are by; use {', '.join(GROUPS)} or tag:NAME")


def _idle(hours: Iterable[Any]) -> list[IdleLine]:
    lines: dict[tuple[str, str], IdleLine] = {}
    for hour in hours:
        key = (hour.upstream, hour.currency)
        seconds, cost = hour.idle_seconds, hour.idle_cost
        if key in lines:
            before = lines[key]
            seconds += before.seconds
            cost = None if cost is None or before.cost is None else EXACT.add(cost, before.cost)
        lines[key] = IdleLine(upstream=hour.upstream, currency=hour.currency, seconds=seconds, cost=cost)
    return list(lines.values())


def _spread(
    line: IdleLine, rows: Iterable[Row[Any]], shares: Mapping[tuple[str | None, str], Decimal]
) -> dict[tuple[str | None, str], Decimal]:
    """`shares` with this device's idle cost added, by device time; the last one takes what rounding leaves."""
    result = dict(shares)
    users = [row for row in rows if (row.upstream, row.currency) == (line.upstream, line.currency) and row.seconds]
    if line.cost is None:
        return result
    left, times = line.cost, [Decimal(repr(float(row.seconds))) for row in users]
    for number, (row, seconds) in enumerate(zip(users, times, strict=True), 1):
        part = _SHARES.divide(_SHARES.multiply(line.cost, seconds), sum(times))
        part = left if number == len(users) else _SHARES.quantize(part, DEVICE_COST_QUANTUM)
        left = EXACT.subtract(left, part)
        key = (row.name, row.currency)
        result[key] = EXACT.add(result.get(key, Decimal(0)), part)
    return result


def _lines(rows: Iterable[Row[Any]], shares: Mapping[tuple[str | None, str], Decimal]) -> list[MarginLine]:
    """One a name and currency, over all upstreams."""
    groups: dict[tuple[str | None, str], list[Row[Any]]] = {}
    for row in rows:
        groups.setdefault((row.name, row.currency), []).append(row)
    lines = [
        MarginLine(
            name=key[0],
            currency=key[1],
            attempts=sum(row.attempts for row in group),
            billed=_total(row.billed for row in group),
            billed_unknown=sum(row.billed_unknown for row in group),
            cost=_total(row.cost for row in group),
            cost_unknown=sum(row.cost_unknown for row in group),
            idle_cost=shares.get(key, Decimal(0)),
        )
        for key, group in groups.items()
    ]
    return sorted(lines, key=lambda line: (-(line.billed or Decimal(0)), line.name or ""))


def _total(amounts: Iterable[Decimal | None]) -> Decimal | None:
    """Of those that are known; None where none is."""
    known = [amount for amount in amounts if amount is not None]
    return total(known) if known else None
