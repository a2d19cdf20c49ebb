"""Windows of budgets and limits: minute, hour, day, week (from Monday), month or none, on the clock of a time zone."""

from datetime import UTC, datetime, timedelta
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

Window = Literal["hour", "day", "week", "month", "none"]
"""A budget's."""
Period = Window | Literal["minute"]
"""A minute is the window of a rate limit."""

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
"""When the one window without reset starts."""


def zone(name: str) -> ZoneInfo:
    """The IANA time zone `name`. Raises ValueError with a sentence when there is none."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"{name!r} is not a time zone; use an IANA name such as 'Asia/Tokyo' or 'UTC'") from error


def window_bounds(moment: datetime, window: Period, tz: ZoneInfo) -> tuple[datetime, datetime | None]:
    """Start and end, in UTC, of the window that holds `moment`: start <= moment < end; the end is None without reset.

    Clock changes are the zone's own: a day has 23, 24 or 25 hours, and an hour that the clock shows twice is two
    windows. A midnight that a clock change skips is the moment of the change.
    """
    if window == "none":
        return BEGINNING, None
    if window == "minute":
        start = moment.astimezone(UTC).replace(second=0, microsecond=0)
        return start, start + timedelta(minutes=1)
    start = _start(moment, window, tz)
    if window == "hour":
        # One hour on is the next window, except in the rare zones whose clock changes by half an hour.
        following = (_start(start + timedelta(minutes=30 * n), window, tz) for n in range(2, 5))
        return start, next(later for later in following if later > start)
    local = start.astimezone(tz)
    day = datetime(local.year, local.month, local.day)
    if window == "month":
        later_day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
    else:
        later_day = day + timedelta(days=1 if window == "day" else 7)
    return start, later_day.replace(tzinfo=tz).astimezone(UTC)


def windows_between(earlier: datetime, later: datetime, window: Window, tz: ZoneInfo) -> int:
    """How many windows on the later of two starts of windows is: 0 when they are the same."""
    if window == "none":
        return 0
    if window == "hour":
        hours, rest = divmod(later - earlier, timedelta(hours=1))
        # Half an hour over is one of the rare changes by half an hour: a window of 30 minutes, or one of 90.
        before, after = earlier.astimezone(tz).replace(tzinfo=None), later.astimezone(tz).replace(tzinfo=None)
        return hours + bool(rest and after - before > later - earlier)
    if window == "month":
        start, end = earlier.astimezone(tz), later.astimezone(tz)
        return (end.year - start.year) * 12 + end.month - start.month
    # Not the dates: one that a zone left out, by changing to the other side of the date line, is no window.
    return round((later - earlier) / timedelta(days=1 if window == "day" else 7))


def _start(moment: datetime, window: Period, tz: ZoneInfo) -> datetime:
    local = moment.astimezone(tz)
    if window == "hour":
        # Keep `fold`, which tells the first from the second showing of the same hour.
        return local.replace(minute=0, second=0, microsecond=0).astimezone(UTC)
    day = datetime(local.year, local.month, local.day, tzinfo=tz)
    if window == "week":
        day -= timedelta(days=day.weekday())
    elif window == "month":
        day = day.replace(day=1)
    return day.astimezone(UTC)
