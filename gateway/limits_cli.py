"""`farthing limits …`: how many requests and tokens a minute, and calls at once. Heavy imports wait, as in cli.py."""

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from gateway.budgets_cli import Also, Org, Which, further_scopes, scope_columns, scope_id, scope_words, scopes_of
from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.limits import Limit
    from gateway.budgets_cli import Names

app = typer.Typer(help="Set, list and remove rate limits.", no_args_is_help=True)


_WORDS = {"requests": "requests a minute", "tokens": "tokens a minute", "concurrent": "calls at the same time"}


@app.command("set")
def set_(
    kind: Annotated[str, typer.Argument(metavar="SCOPE", help="org, team, user, key, tag or model.")],
    which: Which,
    requests: Annotated[int | None, typer.Option(min=0, help="Requests a minute.")] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="Tokens a minute, prompt and output.")] = None,
    concurrent: Annotated[int | None, typer.Option(min=0, help="Calls at the same time.")] = None,
    also: Also = None,
    org: Org = "default",
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make limits of a scope, or change those there are; a kind that is not named stays as it is."""
    wanted = {"requests": requests, "tokens": tokens, "concurrent": concurrent}
    given = {name: value for name, value in wanted.items() if value is not None}
    if not given:
        fail("say what to limit: --requests, --tokens or --concurrent")

    async def work(connection: "AsyncConnection") -> None:
        from typing import cast

        from billing.allowances import LimitKind, ScopeKind
        from billing.limits import set_limit

        identifier = await scope_id(connection, kind, which, org)
        further = await further_scopes(connection, also, org)
        for name, value in given.items():
            # The scope is checked by set_limit.
            await set_limit(connection, cast(ScopeKind, kind), identifier, cast(LimitKind, name), value, also=further)

    in_database(work, database_url, data_dir)
    said = ", ".join(f"{value} {_WORDS[name]}" for name, value in given.items())
    typer.echo(f"{scope_words(kind, which, also)}: {said}")


@app.command("list")
def list_(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List all limits with what is taken of them in this minute, or now."""

    async def work(connection: "AsyncConnection") -> "tuple[list[Limit], Names]":
        from billing.limits import list_limits
        from gateway.scope_names import scope_names

        limits = await list_limits(connection)
        return limits, await scope_names(connection, scopes_of(limits))

    limits, names = in_database(work, database_url, data_dir)

    rows = [
        {
            "id": limit.id,
            **scope_columns(limit, names, as_json),
            "kind": limit.kind,
            "limit": limit.limit,
            "leased": limit.leased,
        }
        for limit in limits
    ]
    show(rows, as_json)


@app.command()
def remove(
    limit_id: Annotated[UUID, typer.Argument(metavar="ID", help="The id that `farthing limits list` shows.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Forget a limit."""

    async def work(connection: "AsyncConnection") -> bool:
        from billing.limits import remove_limit

        return await remove_limit(connection, limit_id)

    if not in_database(work, database_url, data_dir):
        fail(f"there is no limit {limit_id}; `farthing limits list` shows all")
    typer.echo(f"removed {limit_id}")
