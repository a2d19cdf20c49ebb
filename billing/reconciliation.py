"""An upstream's bill beside what the ledger says of its attempts: per UTC day and model, what differs."""

from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import NamedTuple

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.bills import COUNTS, BillLine, slack
from billing.charge import EXACT
from billing.gaps import Gap, gap
from billing.ids import smallest_id

TOLERANCE = Decimal("0.005")
"""Of the larger side; on top of what rounding on the bill explains."""

_ID_SLACK = timedelta(days=1)  # an attempt may start long after its operation

_OURS = text("""
SELECT (a.started_at AT TIME ZONE 'UTC')::date AS day, a.model, count(*) AS attempts,
       sum(a.input_fresh + a.input_cached + a.input_cache_write) AS prompt_tokens,
       sum(a.input_fresh) AS input_fresh, sum(a.input_cached) AS input_cached,
       sum(a.input_cache_write) AS input_cache_write, sum(a.output_text + a.output_reasoning) AS completion_tokens,
       coalesce(sum(a.cost + coalesce(j.cost, 0)) FILTER (WHERE m.known), 0)
           + coalesce(sum(j.cost) FILTER (WHERE a.cost IS NULL AND m.same), 0) AS cost,
       count(*) FILTER (WHERE NOT m.known AND j.cost IS NULL) AS unknown
FROM operation o JOIN attempt a ON a.operation_id = o.id
LEFT JOIN (
    SELECT operation_id, number, sum(cost_delta) AS cost FROM adjustment
    WHERE operation_id >= :first AND operation_id < :after GROUP BY operation_id, number
) j ON j.operation_id = a.operation_id AND j.number = a.number
CROSS JOIN LATERAL (
    SELECT CAST(:currency AS text) IS NULL OR o.currency = :currency AS same,
           a.cost IS NOT NULL AND (CAST(:currency AS text) IS NULL OR o.currency = :currency) AS known
) m
WHERE a.upstream = :upstream AND a.started_at >= :start AND a.started_at < :end
  AND o.id >= :first AND o.id < :after AND a.operation_id >= :first AND a.operation_id < :after
GROUP BY 1, 2
""")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One amount of a model on a day (of all of them: None) on both sides."""

    day: date | None
    model: str | None
    what: str
    """prompt_tokens, another count, or cost."""
    bill: Decimal
    ledger: Decimal
    difference: Decimal
    """Bill less ledger."""


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    upstream: str
    first_day: date
    last_day: date
    currency: str | None
    compared: int
    """Days of models that either side has."""
    differences: tuple[Difference, ...]
    """Above the tolerance, by day and model."""
    totals: tuple[Difference, ...]
    """Of all days, whether or not they differ."""
    unknown: int
    """Attempts in the ledger whose cost is unknown or in another currency: in no cost."""
    gap: Gap | None
    """Days that the ledger has no longer: there the bill stands alone."""


class _Side(NamedTuple):
    amounts: Mapping[str, Decimal]
    slack: Decimal = Decimal(0)


async def reconcile(
    conn: AsyncConnection,
    upstream: str,
    bill: Iterable[BillLine],
    *,
    month: str | None = None,
    tolerance: Decimal = TOLERANCE,
    names: Mapping[str, str] | None = None,
) -> Reconciliation:
    """Compare what the bill speaks of, over its days or those of `month` (like 2026-11).

    `names`: what a model is called on the bill -> in the ledger, where they differ. Raises ValueError on a bill in
    several currencies, an unknown upstream, a bad month or tolerance, or no day to compare.
    """
    if not (tolerance.is_finite() and 0 <= tolerance < 1):
        raise ValueError(f"the tolerance is a share like 0.005, from 0 up to 1, not {tolerance}")
    lines = [line for line in bill if month is None or f"{line.day:%Y-%m}" == month]
    if not lines:
        raise ValueError(f"the bill has no day of {month}")
    currencies = {line.currency for line in lines if line.currency}
    if len(currencies) > 1:
        raise ValueError(f"the bill is in {', '.join(sorted(currencies))}: reconcile one currency at a time")
    currency = next(iter(currencies), None)
    first, last = _days(lines, month)
    theirs = _theirs(lines, names or {})
    ours, unknown = await _ours(conn, upstream, first, last, currency)
    compared = [name for name in (*COUNTS, "cost") if any(name in side.amounts for side in theirs.values())]
    keys = sorted({*theirs, *ours})
    empty = _Side({})
    found = [
        difference
        for key in keys
        for difference in _compared(key, theirs.get(key, empty), ours.get(key, empty), compared)
        if _differs(difference, tolerance, theirs.get(key, empty).slack)
    ]
    totals = _compared((None, None), _total(theirs.values()), _total(ours.values()), compared)
    return Reconciliation(
        upstream=upstream,
        first_day=first,
        last_day=last,
        currency=currency,
        compared=len(keys),
        differences=tuple(found),
        totals=tuple(totals),
        unknown=unknown if "cost" in compared else 0,
        gap=await gap(conn, *_period(first, last)),
    )


def _days(lines: list[BillLine], month: str | None) -> tuple[date, date]:
    if month is None:
        return min(line.day for line in lines), max(line.day for line in lines)
    first = lines[0].day.replace(day=1)
    return first, (first + timedelta(days=31)).replace(day=1) - timedelta(days=1)


def _period(first: date, last: date) -> tuple[datetime, datetime]:
    start, end = (datetime.combine(day, time(), UTC) for day in (first, last))
    return start, end + timedelta(days=1)


def _theirs(lines: list[BillLine], names: Mapping[str, str]) -> dict[tuple[date, str], _Side]:
    amounts: dict[tuple[date, str], dict[str, Decimal]] = {}
    costs: dict[tuple[date, str], list[Decimal]] = {}
    for line in lines:
        key = (line.day, names.get(line.model, line.model))
        cell = amounts.setdefault(key, {})
        for name, count in line.counts.items():
            cell[name] = cell.get(name, Decimal(0)) + count
        if line.cost is not None:
            cell["cost"] = EXACT.add(cell.get("cost", Decimal(0)), line.cost)
            costs.setdefault(key, []).append(line.cost)
    return {key: _Side(cell, slack(iter(costs.get(key, ())))) for key, cell in amounts.items()}


async def _ours(
    conn: AsyncConnection, upstream: str, first: date, last: date, currency: str | None
) -> tuple[dict[tuple[date, str], _Side], int]:
    start, end = _period(first, last)
    parameters = {
        "upstream": upstream,
        "start": start,
        "end": end,
        "first": smallest_id(start - _ID_SLACK),
        "after": smallest_id(end + _ID_SLACK),
        "currency": currency,
    }
    rows = (await conn.execute(_OURS, parameters)).mappings().all()
    sides = {
        (row["day"], row["model"]): _Side({name: Decimal(row[name]) for name in (*COUNTS, "cost")}) for row in rows
    }
    if not sides:
        known = sorted((await conn.execute(text("SELECT DISTINCT upstream FROM attempt"))).scalars())
        if upstream not in known:
            raise ValueError(f"the ledger knows no upstream {upstream!r}; it has {', '.join(known) or 'none'}")
    return sides, sum(row["unknown"] for row in rows)


def _compared(
    key: tuple[date | None, str | None], theirs: _Side, ours: _Side, names: Iterable[str]
) -> list[Difference]:
    found = []
    for name in names:
        bill, ledger = theirs.amounts.get(name, Decimal(0)), ours.amounts.get(name, Decimal(0))
        found.append(
            Difference(
                day=key[0],
                model=key[1],
                what=name,
                bill=bill,
                ledger=ledger,
                difference=EXACT.subtract(bill, ledger),
            )
        )
    return found


def _differs(found: Difference, tolerance: Decimal, rounding: Decimal) -> bool:
    allowed = max(abs(found.bill), abs(found.ledger)) * tolerance
    return abs(found.difference) > allowed + (rounding if found.what == "cost" else 0)


def _total(sides: Iterable[_Side]) -> _Side:
    totals: dict[str, Decimal] = {}
    for side in sides:
        for name, amount in side.amounts.items():
            totals[name] = EXACT.add(totals.get(name, Decimal(0)), amount)
    return _Side(totals)
