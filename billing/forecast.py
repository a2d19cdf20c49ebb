"""What the month would come to: what it has come to so far, and what the days that are left came to in weeks before.

Each day still to come is expected to bring the mean of the same weekday over the last 28 whole days; with less than two
weeks of history, the mean of all its days. Of today what is left of the day brings its share. The range says how far
the sum could be off if days go on to vary as they have (80 %, taking the days' deviations as independent and normal,
and the error of the means with them); it knows nothing of growth or of a new customer.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal
from typing import NamedTuple

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.breakdown import UsageRow, usage_by
from billing.filters import Filters
from billing.windows import window_bounds, zone

HISTORY_DAYS = 28
WEEKDAYS_FROM = 14
"""Days of history from which on weekdays are told apart: each has been seen twice."""
QUANTILE = Decimal("1.2816")
"""Of the standard normal distribution: 80 % lie within so many deviations."""

_CONTEXT = Context(prec=50)
_ZERO = Decimal(0)
AMOUNTS = ("billed", "cost", "margin")


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """One amount of a month. None: nothing of it is known."""

    so_far: Decimal | None
    expected: Decimal | None
    """`so_far`, and what the rest of the month would bring."""
    low: Decimal | None
    high: Decimal | None


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """A month in one currency."""

    month: str
    currency: str
    billed: Range
    cost: Range
    margin: Range
    unknown: int
    """Operations of the month whose charge is unknown: in no amount."""
    history_days: int
    by_weekday: bool
    days_left: Decimal
    """Of the month, today's rest included."""


class _Month(NamedTuple):
    name: str
    start: datetime
    today: date
    rest_of_today: Decimal
    later: list[date]
    """Days that are still to come."""

    @property
    def days_left(self) -> Decimal:
        return self.rest_of_today + len(self.later)


async def forecast_month(
    conn: AsyncConnection,
    filters: Filters = Filters(),  # noqa: B008 - frozen
    time_zone: str = "UTC",
    now: datetime | None = None,
) -> list[Forecast]:
    """The month that runs in `time_zone`, one row a currency. Raises ValueError on an unknown time zone."""
    tz = zone(time_zone)
    now = now or datetime.now(UTC)
    start, end = window_bounds(now, "month", tz)
    day_start, day_end = window_bounds(now, "day", tz)
    assert end is not None and day_end is not None
    today = now.astimezone(tz).date()
    last = (end - timedelta(hours=1)).astimezone(tz).date()
    rest = Decimal((day_end - now) // timedelta(seconds=1)) / ((day_end - day_start) // timedelta(seconds=1))
    later = [today + timedelta(days=n) for n in range(1, (last - today).days + 1)]
    month = _Month(f"{today:%Y-%m}", start, today, rest, later)
    first = window_bounds(now - timedelta(days=HISTORY_DAYS), "day", tz)[0]
    days = await usage_by(conn, ["day"], min(start, first), now + timedelta(microseconds=1), filters, time_zone)
    currencies = sorted({row.currency for row in days})
    return [_forecast(month, [row for row in days if row.currency == currency]) for currency in currencies]


def _forecast(month: _Month, rows: Sequence[UsageRow]) -> Forecast:
    by_day = {date.fromisoformat(row.by["day"] or ""): row for row in rows}
    earliest = max(min(by_day), month.today - timedelta(days=HISTORY_DAYS))
    history = [earliest + timedelta(days=n) for n in range((month.today - earliest).days)]
    by_weekday = len(history) >= WEEKDAYS_FROM
    ranges = {
        name: _range(
            {day: getattr(row, name) for day, row in by_day.items() if f"{day:%Y-%m}" == month.name},
            {day: getattr(by_day[day], name) if day in by_day else _ZERO for day in history},
            month,
            by_weekday,
            only_grows=name != "margin",
        )
        for name in AMOUNTS
    }
    return Forecast(
        month=month.name,
        currency=rows[0].currency,
        unknown=sum(row.billed_unknown for day, row in by_day.items() if f"{day:%Y-%m}" == month.name),
        history_days=len(history),
        by_weekday=by_weekday,
        days_left=month.days_left,
        **ranges,
    )


def _range(
    this_month: Mapping[date, Decimal | None],
    history: Mapping[date, Decimal | None],
    month: _Month,
    by_weekday: bool,
    only_grows: bool,
) -> Range:
    """A day of which nothing is known says nothing; without any day that does, only `so_far` can be told."""
    known = [amount for amount in this_month.values() if amount is not None]
    so_far = _sum(known) if known or not this_month else None
    past = {day: amount for day, amount in history.items() if amount is not None}
    if so_far is None or not past:
        return Range(so_far=so_far, expected=None, low=None, high=None)
    groups: dict[int, list[Decimal]] = {}
    for day, amount in past.items():
        groups.setdefault(day.weekday() if by_weekday else 0, []).append(amount)
    means = {group: _sum(amounts) / len(amounts) for group, amounts in groups.items()}
    overall = _sum(list(past.values())) / len(past)
    shares = [(month.today, month.rest_of_today), *((day, Decimal(1)) for day in month.later)]
    rest = _sum([share * means.get(day.weekday() if by_weekday else 0, overall) for day, share in shares])
    expected = _CONTEXT.add(so_far, rest)
    margin = QUANTILE * _deviation(groups, means, month.days_left, len(past))
    low, high = _CONTEXT.subtract(expected, margin), _CONTEXT.add(expected, margin)
    return Range(so_far=so_far, expected=expected, low=max(low, so_far) if only_grows else low, high=high)


def _deviation(
    groups: Mapping[int, Sequence[Decimal]], means: Mapping[int, Decimal], days: Decimal, observed: int
) -> Decimal:
    """Standard deviation of the sum of `days` more days: their own scatter, and the error of the means."""
    freedom = observed - len(groups)
    if freedom < 1:
        return _ZERO
    squares = _sum([(amount - means[group]) ** 2 for group, amounts in groups.items() for amount in amounts])
    variance = squares / freedom
    return _CONTEXT.sqrt(variance * days + variance * days * days / observed)


def _sum(amounts: Sequence[Decimal]) -> Decimal:
    total = _ZERO
    for amount in amounts:
        total = _CONTEXT.add(total, amount)
    return total
