"""`farthing orgs|teams|users …`: who there is. Heavy imports wait, as in cli.py."""

from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from gateway.command_line import DatabaseUrl, DataDir, Json, in_database, show

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

orgs = typer.Typer(help="Create, list and rename organisations.", no_args_is_help=True)
teams = typer.Typer(help="Create, list and rename teams.", no_args_is_help=True)
users = typer.Typer(help="Create, list, rename and move users.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="What it is called now.")]
NewName = Annotated[str, typer.Argument(metavar="NEW", help="What it is to be called.")]
OrgName = Annotated[str, typer.Option("--org", help="Organisation that it is in.")]
OnlyOrg = Annotated[str | None, typer.Option("--org", help="Only those of this organisation.")]


@orgs.command("create")
def create_org(
    name: Annotated[str, typer.Argument(help="What it is called.")],
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make an organisation."""

    async def work(connection: "AsyncConnection") -> UUID:
        from billing.people import create_org

        return await create_org(connection, name)

    show([{"id": in_database(work, database_url, data_dir), "name": name}], as_json)


@orgs.command("list")
def list_orgs(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List all organisations, oldest first."""

    async def work(connection: "AsyncConnection") -> list[Any]:
        from billing.directory import list_orgs

        return await list_orgs(connection)

    found = in_database(work, database_url, data_dir)
    show([{"id": each.id, "name": each.name, "created_at": each.created_at} for each in found], as_json)


@orgs.command("rename")
def rename_org(name: Name, new: NewName, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Rename an organisation; what it spent stays its own."""

    async def work(connection: "AsyncConnection") -> None:
        from billing.directory import rename_org

        await rename_org(connection, await _org(connection, name), new)

    in_database(work, database_url, data_dir)
    typer.echo(f"{name} is {new} now")


@teams.command("create")
def create_team(
    name: Annotated[str, typer.Argument(help="What it is called.")],
    org: OrgName = "default",
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make a team."""

    async def work(connection: "AsyncConnection") -> UUID:
        from billing.people import create_team

        return await create_team(connection, await _org(connection, org), name)

    show([{"id": in_database(work, database_url, data_dir), "name": name, "org": org}], as_json)


@teams.command("list")
def list_teams(
    org: OnlyOrg = None, as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None
) -> None:
    """List teams, oldest first."""

    async def work(connection: "AsyncConnection") -> list[Any]:
        from billing.directory import list_teams

        return await list_teams(connection, org_id=None if org is None else await _org(connection, org))

    found = in_database(work, database_url, data_dir)
    rows = [{"id": each.id, "name": each.name, "org": each.org, "created_at": each.created_at} for each in found]
    show(rows, as_json)


@teams.command("rename")
def rename_team(
    name: Name, new: NewName, org: OrgName = "default", database_url: DatabaseUrl = None, data_dir: DataDir = None
) -> None:
    """Rename a team; what it spent stays its own."""

    async def work(connection: "AsyncConnection") -> None:
        from billing.directory import rename_team

        await rename_team(connection, await _team(connection, org, name), new)

    in_database(work, database_url, data_dir)
    typer.echo(f"{name} is {new} now")


@users.command("create")
def create_user(
    name: Annotated[str, typer.Argument(help="What they are called.")],
    org: OrgName = "default",
    team: Annotated[str | None, typer.Option(help="Team of the organisation.")] = None,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make a user."""

    async def work(connection: "AsyncConnection") -> UUID:
        from billing.people import create_user

        team_id = None if team is None else await _team(connection, org, team)
        return await create_user(connection, await _org(connection, org), name, team_id)

    show([{"id": in_database(work, database_url, data_dir), "name": name, "org": org, "team": team}], as_json)


@users.command("list")
def list_users(
    org: OnlyOrg = None, as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None
) -> None:
    """List users, oldest first."""

    async def work(connection: "AsyncConnection") -> list[Any]:
        from billing.directory import list_users

        return await list_users(connection, org_id=None if org is None else await _org(connection, org))

    found = in_database(work, database_url, data_dir)
    rows = [
        {"id": each.id, "name": each.name, "org": each.org, "team": each.team, "created_at": each.created_at}
        for each in found
    ]
    show(rows, as_json)


@users.command("rename")
def rename_user(
    name: Name, new: NewName, org: OrgName = "default", database_url: DatabaseUrl = None, data_dir: DataDir = None
) -> None:
    """Rename a user; what they spent stays their own."""

    async def work(connection: "AsyncConnection") -> None:
        from billing.directory import rename_user

        await rename_user(connection, await _user(connection, org, name), new)

    in_database(work, database_url, data_dir)
    typer.echo(f"{name} is {new} now")


@users.command("move")
def move_user(
    name: Name,
    team: Annotated[str | None, typer.Argument(help="Team of the organisation; left out: none.")] = None,
    org: OrgName = "default",
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Put a user into another team; what they spent stays with the team that it was spent in."""

    async def work(connection: "AsyncConnection") -> None:
        from billing.directory import move_user

        team_id = None if team is None else await _team(connection, org, team)
        await move_user(connection, await _user(connection, org, name), team_id)

    in_database(work, database_url, data_dir)
    typer.echo(f"{name} is in {'no team' if team is None else team} now")


async def _org(connection: "AsyncConnection", name: str) -> UUID:
    from billing.people import find_org

    found = await find_org(connection, name)
    if found is None:
        raise ValueError(f"there is no organisation {name!r}; `farthing orgs list` shows all")
    return found


async def _team(connection: "AsyncConnection", org: str, name: str) -> UUID:
    from billing.people import find_team

    found = await find_team(connection, await _org(connection, org), name)
    if found is None:
        raise ValueError(f"there is no team {name!r} in the organisation {org!r}; `farthing teams list` shows all")
    return found


async def _user(connection: "AsyncConnection", org: str, name: str) -> UUID:
    from billing.people import find_user

    found = await find_user(connection, await _org(connection, org), name)
    if found is None:
        raise ValueError(f"there is no user {name!r} in the organisation {org!r}; `farthing users list` shows all")
    return found
