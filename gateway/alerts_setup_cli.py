"""`farthing alerts rules …` and `farthing alerts channels …`. Heavy imports wait, as in cli.py."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from gateway.budgets_cli import scope_id
from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.alerts.channels import Channel
    from billing.alerts.rules import Rule

rules = typer.Typer(help="What is watched, and from where on it is an alert.", no_args_is_help=True)
channels = typer.Typer(help="Where alerts are sent.", no_args_is_help=True)

Kind = Annotated[str, typer.Argument(metavar="SCOPE", help="all, org, team, user, key, tag or model.")]
Which = Annotated[
    str,
    typer.Argument(
        metavar="WHICH", help="Which one, as for a budget; '*': each one by itself; name='*': each value of a tag."
    ),
]
Org = Annotated[str, typer.Option(help="Organisation of the team or user.")]


@rules.command("set")
def set_rule(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="One of those that `rules kinds` lists.")],
    scope: Kind = "all",
    which: Which = "",
    parameter: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Other than the default; repeatable.")
    ] = None,
    channel: Annotated[
        list[str] | None, typer.Option("--channel", help="Tell only this one; repeatable. Default: every channel.")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Keep the rule, but do not evaluate it.")] = False,
    org: Org = "default",
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make a rule, or replace the one of this kind that the scope has."""
    given = dict(_parameter(each) for each in parameter or [])

    async def work(connection: "AsyncConnection") -> UUID:
        from billing.alerts.rules import set_rule as put

        identifier = await rule_scope_id(connection, scope, which, org)
        return await put(connection, kind, scope, identifier, given, channels=channel, enabled=not off)

    typer.echo(in_database(work, database_url, data_dir))


@rules.command("list")
def list_rules(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List rules with their parameters."""

    async def work(connection: "AsyncConnection") -> "list[Rule]":
        from billing.alerts.rules import list_rules as find

        return await find(connection)

    rows = [
        {
            "id": each.id,
            "kind": each.kind,
            "scope": each.scope.kind,
            "scope_id": each.scope.id or None,
            "parameters": _parameters(each.parameters),
            "channels": "every" if each.channels is None else ", ".join(each.channels),
            "enabled": "yes" if each.enabled else "no",
        }
        for each in in_database(work, database_url, data_dir)
    ]
    show(rows, as_json)


@rules.command("kinds")
def list_kinds(as_json: Json = False) -> None:
    """List what a rule can watch, and the parameters of each kind with their defaults."""
    from billing.alerts.kinds import KINDS

    rows = [
        {
            "kind": name,
            "what": " ".join((kind.__doc__ or "").split()),
            "parameters": _parameters(kind()),
        }
        for name, kind in KINDS.items()
    ]
    show(rows, as_json)


@rules.command("remove")
def remove_rule(
    rule_id: Annotated[UUID, typer.Argument(metavar="ID", help="The id that `rules list` shows.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Forget a rule; what it has opened resolves."""

    async def work(connection: "AsyncConnection") -> bool:
        from billing.alerts.rules import remove_rule as remove

        return await remove(connection, rule_id)

    if not in_database(work, database_url, data_dir):
        fail(f"there is no rule {rule_id}; `farthing alerts rules list` shows all")
    typer.echo(f"removed {rule_id}")


@channels.command("set")
def set_channel(
    name: Annotated[str, typer.Argument(help="What it is called here.")],
    kind: Annotated[str, typer.Argument(metavar="KIND", help="webhook, slack, feishu, dingtalk, wecom or email.")],
    address_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Environment variable of the gateways that holds its URL.")
    ] = None,
    address_file: Annotated[Path | None, typer.Option(help="Or a file that does; read at each sending.")] = None,
    secret_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Likewise, its signing secret (webhook, feishu, dingtalk).")
    ] = None,
    secret_file: Annotated[Path | None, typer.Option(help="Or a file that holds it.")] = None,
    sender: Annotated[str | None, typer.Option("--from", help="Sender of e-mail.")] = None,
    recipient: Annotated[list[str] | None, typer.Option("--to", help="Recipient of e-mail; repeatable.")] = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make a channel, or change the one of that name. Its URL and secret stay where they are: only the place is kept.

    The URL of e-mail is smtps://USER:PASSWORD@HOST:465, smtp://… (STARTTLS) or smtp+plain://… (no encryption).
    """
    address = _reference("address", address_env, address_file)
    if address is None:
        fail("say where its URL is: --address-env NAME or --address-file PATH")
    secret = _reference("secret", secret_env, secret_file)

    async def work(connection: "AsyncConnection") -> None:
        from billing.alerts.channels import set_channel as put

        await put(connection, name, kind, address, secret=secret, sender=sender, recipients=recipient or ())

    in_database(work, database_url, data_dir)
    typer.echo(f"{name}: {kind}, address from {address}. Try it: farthing alerts test {name}")


@channels.command("list")
def list_channels(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List channels."""

    async def work(connection: "AsyncConnection") -> "list[Channel]":
        from billing.alerts.channels import list_channels as find

        return await find(connection)

    rows = [
        {
            "name": each.name,
            "kind": each.kind,
            "address": each.address,
            "secret": each.secret,
            "from": each.sender,
            "to": None if each.recipients is None else ", ".join(each.recipients),
        }
        for each in in_database(work, database_url, data_dir)
    ]
    show(rows, as_json)


@channels.command("remove")
def remove_channel(
    name: Annotated[str, typer.Argument(help="The name that `channels list` shows.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Forget a channel with what waits to be sent there."""

    async def work(connection: "AsyncConnection") -> bool:
        from billing.alerts.channels import remove_channel as remove

        return await remove(connection, name)

    if not in_database(work, database_url, data_dir):
        fail(f"there is no channel {name!r}; `farthing alerts channels list` shows all")
    typer.echo(f"removed {name}")


async def rule_scope_id(connection: "AsyncConnection", kind: str, which: str, org: str) -> str:
    """As rules keep it: names of people become ids, stars stay."""
    from billing.alerts.scopes import rule_scope

    if kind in ("all", "model", "tag") or which in ("", "*"):
        return rule_scope(kind, which).id
    return await scope_id(connection, kind, which, org)


def _parameter(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        fail(f"{text!r} is no parameter; write it as NAME=VALUE")
    return name.strip(), value.strip()


def _parameters(given: Any) -> str:
    import msgspec

    values = msgspec.structs.asdict(given)
    shown = {n: ",".join(map(str, v)) if isinstance(v, tuple) else v for n, v in values.items()}
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def _reference(what: str, variable: str | None, file: Path | None) -> str | None:
    if variable is not None and file is not None:
        fail(f"give --{what}-env or --{what}-file, not both")
    if variable is not None:
        return f"env:{variable}"
    return None if file is None else f"file:{file.absolute()}"
