"""What devices did and cost, hour by hour, from the accounts that engine processes keep of themselves.

An account is a pair of counters, wall and idle seconds since the process began. Each look at it takes over what has
been added since the last one, whoever looked, so that replicas which look at the same engine count nothing twice, and a
gateway that was away misses nothing. What an engine did between the last look and its death is not seen.

The time taken over is what the gateway's last look left, laid before now: an hour's border within it is met exactly,
its share of idle time evenly. An hour keeps the price it was taken over at; a corrected one re-rates calls, not hours.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from decimal import ROUND_FLOOR, Decimal
from typing import NamedTuple

import msgspec
from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.charge import device_cost
from billing.prices import Price
from billing.tables import device_account, device_hour

_HOUR = timedelta(hours=1)
_LONGEST_SECONDS = 10 * 366 * 86_400
"""No engine process runs so long."""
_GONE = timedelta(minutes=1)
"""An upstream that nobody has looked at an engine as for so long is there no more: it was renamed, or taken away."""
_NANOSECOND = Decimal("1E-9")


class DeviceHour(msgspec.Struct, frozen=True, kw_only=True):
    """Of all engine processes that ran as `upstream`: two side by side have two hours in one."""

    upstream: str
    starts_at: datetime
    currency: str
    wall_seconds: Decimal
    busy_seconds: Decimal
    idle_seconds: Decimal
    busy_cost: Decimal | None
    """None: some of it had no price. What requests cost is in their attempts; this is all that steps took."""
    idle_cost: Decimal | None


class _Share(NamedTuple):
    starts_at: datetime
    wall: Decimal
    idle: Decimal


async def take_over(
    conn: AsyncConnection,
    upstream: str,
    instance: str,
    *,
    wall_seconds: float,
    idle_seconds: float,
    price: Price | None,
    currency: str,
) -> None:
    """Add what an engine process's counters have gained since they were last taken over. Safe to repeat, in any order.

    `price`: of the device's hour now; None leaves the cost unknown. Two upstreams that lead to one process: it counts
    for the first, for as long as that is looked at. Raises ValueError for counters that cannot be.
    """
    if not 0 <= idle_seconds <= wall_seconds < _LONGEST_SECONDS:
        raise ValueError(f"{idle_seconds} idle of {wall_seconds} seconds cannot be")
    row = {"upstream": upstream, "instance": instance}
    await conn.execute(insert(device_account).values(row).on_conflict_do_nothing())
    known = device_account.c.instance == instance
    before = (await conn.execute(select(device_account).where(known).with_for_update())).one()
    now = (await conn.execute(select(func.clock_timestamp()))).scalar_one()
    wall = Decimal(repr(float(wall_seconds))) - before.wall_seconds
    if wall <= 0 or (before.upstream != upstream and now - before.read_at < _GONE):
        return
    idle = min(max(Decimal(repr(float(idle_seconds))) - before.idle_seconds, Decimal(0)), wall)
    # In the order of their keys: two engines of one upstream lock its hours one after the other.
    for share in _shares(now, wall, idle):
        await _add(conn, upstream, currency, price, share)
    gained = {"wall_seconds": before.wall_seconds + wall, "idle_seconds": before.idle_seconds + idle, "read_at": now}
    await conn.execute(update(device_account).where(known).values(gained | {"upstream": upstream}))


async def device_hours(conn: AsyncConnection, start: datetime, end: datetime) -> list[DeviceHour]:
    """The hours that begin in [start, end), by upstream and time."""
    columns = device_hour.c
    query = select(device_hour).where(columns.starts_at >= start, columns.starts_at < end)
    rows = await conn.execute(query.order_by(columns.upstream, columns.starts_at, columns.currency))
    return [DeviceHour(**row._mapping) for row in rows]


def _shares(now: datetime, wall: Decimal, idle: Decimal) -> Iterator[_Share]:
    """`wall` seconds that end now, cut at the hours: all of the time, and all of what was idle, in no hour twice."""
    began = now - timedelta(seconds=float(wall))
    hour = began.replace(minute=0, second=0, microsecond=0)
    wall_left, idle_left = wall, idle
    while hour + _HOUR < now:
        part = hour + _HOUR - max(began, hour)
        share = min(Decimal(part // timedelta(microseconds=1)).scaleb(-6), wall_left)
        idle_share = min((idle * share / wall).quantize(_NANOSECOND, ROUND_FLOOR), share, idle_left)
        idle_share = max(idle_share, idle_left - (wall_left - share))  # the hours left have room for no more
        yield _Share(hour, share, idle_share)
        wall_left, idle_left, hour = wall_left - share, idle_left - idle_share, hour + _HOUR
    yield _Share(hour, wall_left, idle_left)


async def _add(conn: AsyncConnection, upstream: str, currency: str, price: Price | None, share: _Share) -> None:
    busy = share.wall - share.idle
    amounts: dict[str, Decimal | None] = {
        "wall_seconds": share.wall,
        "busy_seconds": busy,
        "idle_seconds": share.idle,
        "busy_cost": None if price is None else device_cost(price, busy),
        "idle_cost": None if price is None else device_cost(price, share.idle),
    }
    row = {"upstream": upstream, "starts_at": share.starts_at, "currency": currency, **amounts}
    adding = insert(device_hour).values(row)
    sums: dict[str, ColumnElement[Decimal]] = {name: device_hour.c[name] + adding.excluded[name] for name in amounts}
    keys = [column.name for column in device_hour.primary_key]
    await conn.execute(adding.on_conflict_do_update(index_elements=keys, set_=sums))
