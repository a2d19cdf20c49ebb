"""`farthing margins` and `farthing devices`: what calls and one's own devices brought in and cost."""

from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.amounts import money
from gateway.command_line import DatabaseUrl, DataDir, Json, in_database, show, warn
from gateway.usage_options import From, Last, TimeZone, To, period

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection


def devices(
    last: Last = None,
    first: From = None,
    to: To = None,
    time_zone: TimeZone = "UTC",
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """What the devices of your own engines cost by the hour, and how much of it was idle."""
    start, end = period(last, first, to, time_zone)

    async def work(connection: "AsyncConnection") -> list[Any]:
        from billing.devices import device_hours

        return await device_hours(connection, start, end)

    hours = in_database(work, database_url, data_dir)
    rows = [{name: getattr(hour, name) for name in hour.__struct_fields__} for hour in hours]
    if not as_json:
        for row in rows:
            row |= {name: f"{row[name]:,.1f}" for name in ("wall_seconds", "busy_seconds", "idle_seconds")}
            row |= {name: money(row[name]) for name in ("busy_cost", "idle_cost")}
    show(rows, as_json)


def margins(
    last: Last = None,
    first: From = None,
    to: To = None,
    time_zone: TimeZone = "UTC",
    by: Annotated[str, typer.Option(help="model, upstream, org, team, user, key, or tag:NAME.")] = "model",
    spread_idle: Annotated[
        bool, typer.Option("--spread-idle", help="Share a device's idle time out over who used it.")
    ] = False,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """What each model, user or scenario was billed and cost; idle devices on lines of their own, or spread."""
    start, end = period(last, first, to, time_zone)

    async def work(connection: "AsyncConnection") -> Any:
        from billing.margins import margins as read

        return await read(connection, start, end, by, spread_idle=spread_idle)

    found = in_database(work, database_url, data_dir)
    rows: list[dict[str, Any]] = [
        {
            by: line.name or (None if as_json else f"(no {by})"),
            "currency": line.currency,
            "attempts": line.attempts,
            "billed": line.billed,
            "billed_unknown": line.billed_unknown,
            "cost": line.cost,
            "cost_unknown": line.cost_unknown,
            "idle_cost": line.idle_cost,
            "margin": line.margin,
        }
        for line in found.lines
    ]
    rows += [
        {
            by: f"(idle: {line.upstream})",
            "currency": line.currency,
            "attempts": 0,
            "billed": Decimal(0),
            "billed_unknown": 0,
            "cost": Decimal(0),
            "cost_unknown": 0,
            "idle_cost": line.cost,
            "margin": None if line.cost is None else -line.cost,
        }
        for line in found.idle
    ]
    if not as_json:
        for row in rows:
            row |= {name: money(row[name]) for name in ("billed", "cost", "idle_cost", "margin")}
    show(rows, as_json)
    if found.gap is not None:
        warn(found.gap)
