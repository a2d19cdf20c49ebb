"""`farthing alerts …`: what there was, when nobody is told, whether a channel works. Heavy imports wait."""

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from gateway.alerts_setup_cli import Org, channels, rule_scope_id, rules
from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.alerts.history import Alert, AlertDetail
    from billing.alerts.outbox import Delivery
    from billing.alerts.silences import Silence

app = typer.Typer(help="See alerts; set rules, channels and silences.", no_args_is_help=True)
silences = typer.Typer(help="When nobody is told.", no_args_is_help=True)
app.add_typer(rules, name="rules")
app.add_typer(channels, name="channels")
app.add_typer(silences, name="silences")

TEST_SECONDS = 30.0
"""How long a test waits for a gateway to send it."""


@app.command("list")
def list_(
    all_: Annotated[bool, typer.Option("--all", help="Those that are resolved too.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The newest so many.")] = 100,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """List open alerts, the newest first."""

    async def work(connection: "AsyncConnection") -> "list[Alert]":
        from billing.alerts.history import list_alerts

        return await list_alerts(connection, open_only=not all_, limit=limit)

    rows = [
        {
            "id": each.id,
            "rule": each.kind,
            "scope": each.scope,
            "summary": each.summary,
            "caused_by": ", ".join(map(str, each.causes)) or None,
            "opened_at": each.opened_at,
            "resolved_at": each.resolved_at,
        }
        for each in in_database(work, database_url, data_dir)
    ]
    show(rows, as_json)


@app.command("show")
def show_(
    alert_id: Annotated[UUID, typer.Argument(metavar="ID", help="The id that `farthing alerts list` shows.")],
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Show one alert: its figures, its causes, and what was told to whom."""

    async def work(connection: "AsyncConnection") -> "AlertDetail | None":
        from billing.alerts.history import find_alert

        return await find_alert(connection, alert_id)

    found = in_database(work, database_url, data_dir)
    if found is None:
        fail(f"there is no alert {alert_id}; `farthing alerts list --all` shows all")
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    alert = found.alert
    typer.echo(f"{alert.kind.replace('_', ' ')}, {alert.scope}: {alert.summary}")
    for cause in alert.causes:
        typer.echo(f"  by {cause}")
    for name, value in alert.details.items():
        typer.echo(f"  {name.replace('_', ' ')}: {value}")
    resolved = "still open" if alert.resolved_at is None else f"resolved {alert.resolved_at:%Y-%m-%d %H:%M} UTC"
    typer.echo(f"  opened {alert.opened_at:%Y-%m-%d %H:%M} UTC, {resolved}")
    if found.deliveries:
        show([_delivery(each) for each in found.deliveries], as_json=False)
    else:
        typer.echo("  told to nobody: it is silenced, or there is no channel (`farthing alerts channels set`)")


@app.command()
def test(
    channel: Annotated[str, typer.Argument(help="The channel's name.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Have a running gateway send a test message, and say whether the receiver took it."""

    async def put(connection: "AsyncConnection") -> UUID:
        from billing.alerts.outbox import send_test

        return await send_test(connection, channel)

    identifier = in_database(put, database_url, data_dir)

    async def look(connection: "AsyncConnection") -> "Delivery | None":
        from billing.alerts.outbox import find_delivery

        return await find_delivery(connection, identifier)

    until = time.monotonic() + TEST_SECONDS
    while time.monotonic() < until:
        delivery = in_database(look, database_url, data_dir)
        if delivery is None:
            fail(f"the channel {channel} was removed meanwhile")
        if delivery.status == "sent":
            typer.echo(f"sent to {channel}" + (f", but not to all: {delivery.error}" if delivery.error else ""))
            return
        if delivery.error is not None:
            fail(f"{channel} did not take it: {delivery.error}. It will be tried again")
        time.sleep(0.5)
    fail(f"no gateway has sent it within {TEST_SECONDS:g} seconds; is one running on this database?")


@app.command()
def silence(
    rule: Annotated[UUID | None, typer.Option(metavar="ID", help="Of this rule only.")] = None,
    scope: Annotated[str | None, typer.Option(metavar="SCOPE", help="Of this scope only, with --which.")] = None,
    which: Annotated[str, typer.Option(help="Which one of the scope, as for a budget.")] = "",
    hours: Annotated[float | None, typer.Option(min=0.01, help="For so long.")] = None,
    until: Annotated[str | None, typer.Option(help="Or until then, like 2026-12-01T08:00:00Z.")] = None,
    reason: Annotated[str, typer.Option(help="For whoever looks later.")] = "",
    org: Org = "default",
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Tell nobody for a while; alerts open and resolve as ever, and what still holds then is told at its end."""
    end = _end(hours, until)
    if which and scope is None:
        fail("--which needs --scope: say of which kind it is")

    async def work(connection: "AsyncConnection") -> UUID:
        from billing.alerts.silences import silence as make

        identifier = None if scope is None else await rule_scope_id(connection, scope, which, org)
        return await make(connection, end, rule_id=rule, scope_kind=scope, scope_id=identifier, reason=reason)

    identifier = in_database(work, database_url, data_dir)
    typer.echo(f"silent until {end:%Y-%m-%d %H:%M} UTC ({identifier})")


@silences.command("list")
def list_silences(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List silences, the one that lasts longest first."""

    async def work(connection: "AsyncConnection") -> "list[Silence]":
        from billing.alerts.silences import list_silences as find

        return await find(connection)

    rows = [
        {
            "id": each.id,
            "rule_id": each.rule_id,
            "scope": each.scope_kind,
            "scope_id": each.scope_id,
            "until": each.until,
            "over": "yes" if each.until <= datetime.now(UTC) else "no",
            "reason": each.reason,
        }
        for each in in_database(work, database_url, data_dir)
    ]
    show(rows, as_json)


@silences.command("end")
def end_silence(
    silence_id: Annotated[UUID, typer.Argument(metavar="ID", help="The id that `silences list` shows.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """End a silence now."""

    async def work(connection: "AsyncConnection") -> bool:
        from billing.alerts.silences import end_silence as end

        return await end(connection, silence_id)

    if not in_database(work, database_url, data_dir):
        fail(f"there is no silence {silence_id}; `farthing alerts silences list` shows all")
    typer.echo(f"ended {silence_id}")


def _end(hours: float | None, until: str | None) -> datetime:
    if (hours is None) == (until is None):
        fail("say how long: --hours or --until")
    if hours is not None:
        try:
            return datetime.now(UTC) + timedelta(hours=hours)
        except OverflowError:
            fail(f"{hours:g} hours are too long")
    try:
        return datetime.fromisoformat(str(until))
    except ValueError:
        fail(f"{until!r} is no moment; write it like 2026-12-01T08:00:00Z")


def _delivery(delivery: "Delivery") -> dict[str, Any]:
    return {
        "told": delivery.event,
        "channel": delivery.channel,
        "status": delivery.status,
        "attempts": delivery.attempts,
        "error": delivery.error,
        "ended_at": delivery.ended_at,
    }
