"""`farthing keys …`: virtual keys, straight in the database. Heavy imports wait, as in cli.py."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.people import KeyInfo, NewKey

app = typer.Typer(help="Create, list and revoke virtual keys.", no_args_is_help=True)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for; need not be unique.")],
    org: Annotated[str, typer.Option(help="Organisation, made if there is none of that name.")] = "default",
    team: Annotated[str | None, typer.Option(help="Team, likewise.")] = None,
    user: Annotated[str | None, typer.Option(help="User, likewise.")] = None,
    days: Annotated[int | None, typer.Option(min=1, max=36_500, help="Days until it expires (default: never).")] = None,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make a key and show it, this once: the database keeps only its hash."""
    expires_at = datetime.now(UTC) + timedelta(days=days) if days else None

    async def work(connection: "AsyncConnection") -> "NewKey":
        from billing import people

        org_id = await people.find_org(connection, org) or await people.create_org(connection, org)
        team_id = user_id = None
        if team is not None:
            team_id = await people.find_team(connection, org_id, team)
            team_id = team_id or await people.create_team(connection, org_id, team)
        if user is not None:
            user_id = await people.find_user(connection, org_id, user)
            user_id = user_id or await people.create_user(connection, org_id, user, team_id)
        return await people.create_key(
            connection, org_id, name, team_id=team_id, user_id=user_id, expires_at=expires_at
        )

    key = in_database(work, database_url, data_dir)
    show([{"id": key.id, "name": name, "expires_at": expires_at, "key": key.secret}], as_json)


@app.command("list")
def list_(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List all keys, oldest first."""

    async def work(connection: "AsyncConnection") -> "list[KeyInfo]":
        from billing import people

        return await people.list_keys(connection)

    keys = in_database(work, database_url, data_dir)
    rows = [
        {
            "id": key.key_id,
            "prefix": key.prefix,
            "name": key.name,
            "created_at": key.created_at,
            "expires_at": key.expires_at,
            "revoked_at": key.revoked_at,
        }
        for key in keys
    ]
    show(rows, as_json)


@app.command()
def revoke(
    key_id: Annotated[UUID, typer.Argument(metavar="ID", help="The id that `farthing keys list` shows.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Refuse a key from now on."""

    async def work(connection: "AsyncConnection") -> bool:
        from billing import people

        return await people.revoke_key(connection, key_id)

    if not in_database(work, database_url, data_dir):
        fail(f"there is no key {key_id}; `farthing keys list` shows all")
    typer.echo(f"revoked {key_id}")
