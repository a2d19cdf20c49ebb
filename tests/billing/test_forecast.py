"""What the month would be, on ledgers whose future is known."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from random_ledger import store
from samples import an_operation
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.filters import Filters
from billing.forecast import forecast_month
from billing.ids import smallest_id

NOW = datetime(2026, 10, 19, 12, tzinfo=UTC)  # a Monday


def spent(at: datetime, amount: Decimal | int, number: int = 0, **fields: Any) -> Any:
    money = {"billed": Decimal(amount), "cost": Decimal(amount) / 4, "attempts": []}
    return an_operation(id=UUID(int=smallest_id(at).int + number), started_at=at, **(money | fields))


def every_day(first: datetime, amount: Any) -> list[Any]:
    days = [first + timedelta(days=n) for n in range((NOW - first).days + 1)]
    return [spent(day, amount(day)) for day in days if day < NOW]


async def test_a_steady_month_goes_on(conn: AsyncConnection) -> None:
    await store(conn, every_day(NOW - timedelta(days=40, hours=6), lambda day: 24))
    [found] = await forecast_month(conn, now=NOW)
    assert (found.month, found.history_days, found.by_weekday, found.days_left) == (
        "2026-10",
        28,
        True,
        Decimal("12.5"),
    )
    assert found.billed.so_far == 19 * 24
    assert found.billed.expected == 19 * 24 + Decimal("12.5") * 24
    assert found.billed.low == found.billed.high == found.billed.expected
    assert found.margin.expected is not None and found.cost.expected is not None
    assert found.margin.expected == found.billed.expected - found.cost.expected


async def test_weekdays_are_told_apart(conn: AsyncConnection) -> None:
    await store(conn, every_day(NOW - timedelta(days=40, hours=6), lambda day: 10 if day.weekday() < 5 else 1))
    [found] = await forecast_month(conn, now=NOW)
    # Half a Monday, 9 whole weekdays and 3 days of weekends are left.
    assert found.billed.so_far is not None
    assert found.billed.expected == found.billed.so_far + 5 + 90 + 3


async def test_a_short_past_makes_a_wide_range_and_no_weekdays(conn: AsyncConnection) -> None:
    await store(conn, every_day(NOW - timedelta(days=4, hours=6), lambda day: 5 * (day.day % 3)))
    [found] = await forecast_month(conn, now=NOW)
    billed = found.billed
    assert (found.by_weekday, found.history_days) == (False, 4)
    assert billed.so_far is not None and billed.expected is not None
    assert billed.low is not None and billed.high is not None
    assert billed.so_far <= billed.low < billed.expected < billed.high


async def test_the_range_holds_what_is_expected_to_the_last_digit(conn: AsyncConnection) -> None:
    await store(conn, [spent(NOW - timedelta(days=1), 1), spent(NOW - timedelta(minutes=1), 0, 1)])
    [found] = await forecast_month(conn, now=NOW + timedelta(seconds=1))  # the rest of today is no short number
    assert found.billed.low == found.billed.expected == found.billed.high


async def test_without_a_whole_day_only_what_was_spent_is_told(conn: AsyncConnection) -> None:
    await store(conn, [spent(NOW - timedelta(hours=1), 3)])
    [found] = await forecast_month(conn, now=NOW)
    assert (found.billed.so_far, found.billed.expected, found.history_days) == (3, None, 0)


async def test_what_is_unknown_is_counted_and_in_no_amount(conn: AsyncConnection) -> None:
    await store(conn, [spent(NOW - timedelta(days=2), 3), spent(NOW - timedelta(days=2), 1, 1, billed=None, cost=None)])
    [found] = await forecast_month(conn, now=NOW)
    assert (found.billed.so_far, found.unknown) == (3, 1)
    assert await forecast_month(conn, Filters(model="nobody"), now=NOW) == []


async def test_the_month_is_the_one_of_the_time_zone(conn: AsyncConnection) -> None:
    now = datetime(2026, 10, 31, 20, tzinfo=UTC)  # November in Tokyo
    await store(conn, [spent(now - timedelta(hours=1), 3), spent(now - timedelta(days=1), 5)])
    [tokyo] = await forecast_month(conn, time_zone="Asia/Tokyo", now=now)
    [utc] = await forecast_month(conn, now=now)
    assert (tokyo.month, tokyo.billed.so_far) == ("2026-11", 3)
    assert (utc.month, utc.billed.so_far) == ("2026-10", 8)
