"""Windows on the wall clock, over clock changes."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.windows import BEGINNING, Window, window_bounds, windows_between, zone

NEW_YORK, TOKYO = ZoneInfo("America/New_York"), ZoneInfo("Asia/Tokyo")


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def bounds(moment: str, window: Window, tz: ZoneInfo) -> tuple[str, str]:
    start, end = window_bounds(at(moment), window, tz)
    assert end is not None
    return f"{start:%m-%d %H:%M}", f"{end:%m-%d %H:%M}"


@pytest.mark.parametrize(
    ("moment", "window", "expected"),
    [
        # Spring forward: 2026-03-08 02:00 EST becomes 03:00 EDT (07:00 UTC). The day has 23 hours.
        ("2026-03-08 06:59", "hour", ("03-08 06:00", "03-08 07:00")),
        ("2026-03-08 07:00", "hour", ("03-08 07:00", "03-08 08:00")),
        ("2026-03-08 12:00", "day", ("03-08 05:00", "03-09 04:00")),
        ("2026-03-08 04:59", "day", ("03-07 05:00", "03-08 05:00")),
        ("2026-03-08 12:00", "week", ("03-02 05:00", "03-09 04:00")),
        ("2026-03-31 23:00", "month", ("03-01 05:00", "04-01 04:00")),
        # Fall back: 2026-11-01 02:00 EDT becomes 01:00 EST (06:00 UTC). The day has 25 hours, 01:30 comes twice.
        ("2026-11-01 05:30", "hour", ("11-01 05:00", "11-01 06:00")),
        ("2026-11-01 06:30", "hour", ("11-01 06:00", "11-01 07:00")),
        ("2026-11-01 12:00", "day", ("11-01 04:00", "11-02 05:00")),
        ("2026-11-01 12:00", "week", ("10-26 04:00", "11-02 05:00")),
        ("2026-11-01 12:00", "month", ("11-01 04:00", "12-01 05:00")),
    ],
)
def test_new_york_over_both_clock_changes(moment: str, window: Window, expected: tuple[str, str]) -> None:
    assert bounds(moment, window, NEW_YORK) == expected


@pytest.mark.parametrize(
    ("moment", "window", "expected"),
    [
        # On the days when New York's clock changes, and at a month's end in Tokyo.
        ("2026-03-08 07:30", "day", ("03-07 15:00", "03-08 15:00")),
        ("2026-11-01 06:30", "day", ("10-31 15:00", "11-01 15:00")),
        ("2026-11-01 06:30", "hour", ("11-01 06:00", "11-01 07:00")),
        ("2026-11-01 06:30", "week", ("10-25 15:00", "11-01 15:00")),
        ("2026-12-31 14:59", "month", ("11-30 15:00", "12-31 15:00")),
        ("2026-12-31 15:00", "month", ("12-31 15:00", "01-31 15:00")),
        # Tokyo itself changed its clock in 1948: 05-02 00:00 became 01:00, so the day has 23 hours and starts at 01:00,
        ("1948-05-02 03:00", "day", ("05-01 15:00", "05-02 14:00")),
        # and 1948-09-12 01:00 became 00:00: midnight came twice and the day has 25 hours.
        ("1948-09-11 15:30", "day", ("09-11 14:00", "09-12 15:00")),
        ("1948-09-11 14:30", "day", ("09-11 14:00", "09-12 15:00")),
    ],
)
def test_tokyo(moment: str, window: Window, expected: tuple[str, str]) -> None:
    assert bounds(moment, window, TOKYO) == expected


def test_without_reset_there_is_one_window() -> None:
    assert window_bounds(at("2026-11-29 12:00"), "none", TOKYO) == (BEGINNING, None)


def test_an_hour_in_a_half_hour_zone() -> None:
    assert bounds("2026-11-29 12:45", "hour", ZoneInfo("Asia/Kolkata")) == ("11-29 12:30", "11-29 13:30")


@pytest.mark.parametrize("name", ["", "Mars/Olympus", "../etc/passwd", "UTC\x00", "a" * 5000])
def test_an_unknown_zone_is_one_sentence(name: str) -> None:
    with pytest.raises(ValueError, match="is not a time zone; use an IANA name"):
        zone(name)


ZONES = [
    "UTC",
    "Asia/Tokyo",
    "America/New_York",
    "Australia/Lord_Howe",
    "America/Havana",
    "Asia/Kathmandu",
    "Pacific/Apia",
]
moments = st.datetimes(datetime(2005, 1, 1), datetime(2035, 1, 1), timezones=st.just(UTC))


@given(moments, st.sampled_from(["hour", "day", "week", "month"]), st.sampled_from(ZONES))
def test_windows_tile_time(moment: datetime, window: Window, name: str) -> None:
    tz = ZoneInfo(name)
    start, end = window_bounds(moment, window, tz)
    assert end is not None
    assert start <= moment < end
    assert window_bounds(start, window, tz) == (start, end)
    assert window_bounds(end - timedelta(microseconds=1), window, tz) == (start, end)
    assert window_bounds(end, window, tz)[0] == end


@given(moments, st.sampled_from(["hour", "day", "week", "month"]), st.sampled_from(ZONES), st.integers(0, 40))
def test_windows_are_counted_as_they_come(moment: datetime, window: Window, name: str, count: int) -> None:
    tz = ZoneInfo(name)
    first = start = window_bounds(moment, window, tz)[0]
    for _ in range(count):
        end = window_bounds(start, window, tz)[1]
        assert end is not None
        start = end
    assert windows_between(first, start, window, tz) == count


@pytest.mark.parametrize("window", ["hour", "day", "week", "month"])
@pytest.mark.parametrize("name", ["America/New_York", "Asia/Tokyo", "Australia/Lord_Howe", "Pacific/Apia"])
def test_a_window_is_the_same_whoever_uses_it_first(window: Window, name: str) -> None:
    """Its ends are those of the calendar: none begins with its first call. Over the clock changes of two years."""
    tz = ZoneInfo(name)
    for quarter in range(0, 2 * 366 * 96, 7):
        moment = at("2010-12-31 23:00") + timedelta(minutes=15 * quarter)
        start, end = window_bounds(moment, window, tz)
        assert end is not None and start <= moment < end
        local = start.astimezone(tz)
        if (local.minute, local.second) != (0, 0):
            assert name == "Australia/Lord_Howe" and window == "hour"
        if window == "week":
            assert local.weekday() == 0
        if window == "month":
            assert local.day == 1
