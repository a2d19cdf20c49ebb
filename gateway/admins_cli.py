"""`farthing admins …`: who administers, and with which tokens. Heavy imports wait, as in cli.py."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.administrators import Administrator, Token
    from billing.people import NewSecret

app = typer.Typer(help="Create and revoke administrators, and their tokens for the admin API.", no_args_is_help=True)

Which = Annotated[str, typer.Argument(metavar="WHO", help="Id or e-mail address, as in `farthing admins list`.")]
RoleName = Annotated[str, typer.Option(help="owner, admin, billing_reader or member.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Who it is.")],
    role: RoleName,
    email: Annotated[str | None, typer.Option(help="With which they sign in at the OIDC provider.")] = None,
    org: Annotated[str | None, typer.Option(help="The only organisation they see (default: all).")] = None,
    user: Annotated[str | None, typer.Option(help="Of a member: which user of --org they are.")] = None,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Let somebody administer. They sign in with their e-mail address, or get a token (`farthing admins token`)."""

    async def work(connection: "AsyncConnection") -> "Administrator":
        from typing import cast

        from billing import administrators, people
        from billing.roles import Role

        org_id = user_id = None
        if org is not None:
            org_id = await people.find_org(connection, org)
            if org_id is None:
                raise ValueError(f"there is no organisation {org!r}; `farthing orgs list` shows all")
        if user is not None:
            if org_id is None:
                raise ValueError("give the user's organisation too, with --org")
            user_id = await people.find_user(connection, org_id, user)
            if user_id is None:
                raise ValueError(f"there is no user {user!r} in the organisation {org!r}")
        made = await administrators.create_administrator(
            connection, name, cast(Role, role), email=email, org_id=org_id, user_id=user_id
        )
        return await administrators.get_administrator(connection, str(made))

    show([_facts(in_database(work, database_url, data_dir))], as_json)


@app.command("list")
def list_(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List all administrators, oldest first."""

    async def work(connection: "AsyncConnection") -> "list[Administrator]":
        from billing.administrators import list_administrators

        return await list_administrators(connection)

    show([_facts(each) for each in in_database(work, database_url, data_dir)], as_json)


@app.command()
def role(
    which: Which,
    new: Annotated[str, typer.Argument(metavar="ROLE", help="owner, admin or billing_reader.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Give an administrator another role, from now on."""

    async def work(connection: "AsyncConnection") -> None:
        from typing import cast

        from billing.administrators import change_role, get_administrator
        from billing.roles import Role

        await change_role(connection, (await get_administrator(connection, which)).id, cast(Role, new))

    in_database(work, database_url, data_dir)
    typer.echo(f"{which} is {new} now")


@app.command()
def revoke(which: Which, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """End an administrator's sessions and tokens, now."""

    async def work(connection: "AsyncConnection") -> None:
        from billing.administrators import get_administrator, revoke_administrator

        await revoke_administrator(connection, (await get_administrator(connection, which)).id)

    in_database(work, database_url, data_dir)
    typer.echo(f"revoked {which}")


@app.command()
def token(
    which: Which,
    name: Annotated[str, typer.Option(help="What it is for.")] = "token",
    role: Annotated[str | None, typer.Option(help="The most that it may do (default: what they may).")] = None,
    days: Annotated[int, typer.Option(min=0, max=36_500, help="Days until it expires; 0: never.")] = 90,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make a token for the admin API and show it, this once: the database keeps only its hash."""
    expires_at = datetime.now(UTC) + timedelta(days=days) if days else None

    async def work(connection: "AsyncConnection") -> "NewSecret":
        from typing import cast

        from billing.administrators import create_token, get_administrator
        from billing.roles import Role

        owner = await get_administrator(connection, which)
        wanted = cast("Role | None", role)
        return await create_token(connection, owner.id, name, role=wanted, expires_at=expires_at)

    made = in_database(work, database_url, data_dir)
    show([{"id": made.id, "name": name, "expires_at": expires_at, "token": made.secret}], as_json)


@app.command()
def tokens(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List all tokens, the ended too, oldest first."""

    async def work(connection: "AsyncConnection") -> "list[Token]":
        from billing.administrators import list_tokens

        return await list_tokens(connection)

    rows = [
        {
            "id": each.id,
            "prefix": each.prefix,
            "name": each.name,
            "administrator": each.administrator,
            "role": each.role,
            "created_at": each.created_at,
            "expires_at": each.expires_at,
            "revoked_at": each.revoked_at,
        }
        for each in in_database(work, database_url, data_dir)
    ]
    show(rows, as_json)


@app.command("revoke-token")
def revoke_token(
    token_id: Annotated[UUID, typer.Argument(metavar="ID", help="The id that `farthing admins tokens` shows.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Refuse a token from now on."""

    async def work(connection: "AsyncConnection") -> bool:
        from billing.administrators import revoke_token

        return await revoke_token(connection, token_id)

    if not in_database(work, database_url, data_dir):
        fail(f"there is no token {token_id}; `farthing admins tokens` shows all")
    typer.echo(f"revoked {token_id}")


def _facts(who: "Administrator") -> dict[str, Any]:
    return {
        "id": who.id,
        "name": who.name,
        "email": who.email,
        "role": who.role,
        "org": who.org,
        "signs_in": "yes" if who.signs_in else "not yet",
        "created_at": who.created_at,
        "revoked_at": who.revoked_at,
    }
