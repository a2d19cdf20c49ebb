"""The directory: organisations, teams and users as they are listed, renamed and moved, and whose a scope is."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Select, Table, select, true, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.allowances import ScopeKind
from billing.people import MissingError, TakenError, checked_name
from billing.tables import api_key, app_user, org, team


class Org(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    billing_time_zone: str
    """On whose clock its months begin."""
    created_at: datetime


class Team(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    org_id: UUID
    org: str
    created_at: datetime


class User(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    name: str
    org_id: UUID
    org: str
    team_id: UUID | None
    team: str | None
    created_at: datetime


_ORGS = select(org.c.id, org.c.name, org.c.billing_time_zone, org.c.created_at).order_by(org.c.id)
_TEAMS = (
    select(team.c.id, team.c.name, team.c.org_id, team.c.created_at, org.c.name.label("org"))
    .join(org, org.c.id == team.c.org_id)
    .order_by(team.c.id)
)
_USERS = (
    select(
        *(app_user.c[name] for name in ("id", "name", "org_id", "team_id", "created_at")),
        org.c.name.label("org"),
        team.c.name.label("team"),
    )
    .select_from(app_user.join(org, org.c.id == app_user.c.org_id).outerjoin(team, team.c.id == app_user.c.team_id))
    .order_by(app_user.c.id)
)


async def list_orgs(
    conn: AsyncConnection, *, only: UUID | None = None, after: UUID | None = None, limit: int | None = None
) -> list[Org]:
    """Organisations, oldest first. `only`: the one to show. `after` and `limit` cut out a page, here and below."""
    query = _page(_ORGS, org, after, limit).where(true() if only is None else org.c.id == only)
    return [Org(**row) for row in (await conn.execute(query)).mappings()]


async def list_teams(
    conn: AsyncConnection, *, org_id: UUID | None = None, after: UUID | None = None, limit: int | None = None
) -> list[Team]:
    """Teams, oldest first; of one organisation where given."""
    query = _page(_TEAMS, team, after, limit).where(true() if org_id is None else team.c.org_id == org_id)
    return [Team(**row) for row in (await conn.execute(query)).mappings()]


async def list_users(
    conn: AsyncConnection,
    *,
    org_id: UUID | None = None,
    team_id: UUID | None = None,
    after: UUID | None = None,
    limit: int | None = None,
) -> list[User]:
    """Users, oldest first; of one organisation or team where given."""
    query = _page(_USERS, app_user, after, limit).where(
        true() if org_id is None else app_user.c.org_id == org_id,
        true() if team_id is None else app_user.c.team_id == team_id,
    )
    return [User(**row) for row in (await conn.execute(query)).mappings()]


async def get_org(conn: AsyncConnection, org_id: UUID) -> Org:
    """Raises MissingError when there is none, as do the next two."""
    return Org(**await _one(conn, _ORGS, org, org_id))


async def get_team(conn: AsyncConnection, team_id: UUID) -> Team:
    return Team(**await _one(conn, _TEAMS, team, team_id))


async def get_user(conn: AsyncConnection, user_id: UUID) -> User:
    return User(**await _one(conn, _USERS, app_user, user_id))


async def rename_org(conn: AsyncConnection, org_id: UUID, name: str) -> None:
    """Raises MissingError when there is none, TakenError when another has the name, as do the next two."""
    await _rename(conn, org, org_id, name)


async def rename_team(conn: AsyncConnection, team_id: UUID, name: str) -> None:
    await _rename(conn, team, team_id, name)


async def rename_user(conn: AsyncConnection, user_id: UUID, name: str) -> None:
    await _rename(conn, app_user, user_id, name)


async def move_user(conn: AsyncConnection, user_id: UUID, team_id: UUID | None) -> None:
    """Put a user into another team of the organisation, or into none; what was spent stays with the team it was.

    Raises MissingError when there is no such user, or no such team in the user's organisation.
    """
    user = await get_user(conn, user_id)
    if team_id is not None and (await get_team(conn, team_id)).org_id != user.org_id:
        raise MissingError(f"there is no team {team_id} in organisation {user.org_id}")
    await conn.execute(update(app_user).where(app_user.c.id == user_id).values(team_id=team_id))


async def org_of_scope(conn: AsyncConnection, kind: ScopeKind, scope_id: str) -> UUID | None:
    """The organisation that an org, team, user or key is in; None for a tag or a model, which are everybody's.

    Raises MissingError when there is no such thing: what is set on it would never apply.
    """
    if kind in ("tag", "model"):
        return None
    tables = {"org": org, "team": team, "user": app_user, "key": api_key}
    if kind not in tables:
        raise ValueError(f"{kind!r} is not a scope; use org, team, user, key, tag or model")
    table = tables[kind]
    try:
        identifier = UUID(scope_id)
    except ValueError:
        raise MissingError(f"{scope_id[:100]!r} is not the id of any {kind}") from None
    column = table.c.id if kind == "org" else table.c.org_id
    found = (await conn.execute(select(column).where(table.c.id == identifier))).scalar_one_or_none()
    if found is None:
        raise MissingError(f"there is no {kind} {identifier}")
    return UUID(str(found))


async def scopes_of_org(conn: AsyncConnection, org_id: UUID) -> set[str]:
    """Ids of the organisation and of all its teams, users and keys: what its budgets and limits hang on."""
    found = {str(org_id)}
    for table in (team, app_user, api_key):
        ids = (await conn.execute(select(table.c.id).where(table.c.org_id == org_id))).scalars()
        found |= {str(each) for each in ids}
    return found


def _page(
    query: Select[*tuple[Any, ...]], table: Table, after: UUID | None, limit: int | None
) -> Select[*tuple[Any, ...]]:
    return query.where(true() if after is None else table.c.id > after).limit(limit)


async def _one(conn: AsyncConnection, query: Select[*tuple[Any, ...]], table: Table, identifier: UUID) -> Any:
    row = (await conn.execute(query.where(table.c.id == identifier))).mappings().one_or_none()
    if row is None:
        raise MissingError(f"there is no {_noun(table)} {identifier}")
    return row


async def _rename(conn: AsyncConnection, table: Table, identifier: UUID, name: str) -> None:
    renaming = update(table).where(table.c.id == identifier).values(name=checked_name(name))
    try:
        async with conn.begin_nested():  # a taken name must not abort the caller's transaction
            changed = (await conn.execute(renaming)).rowcount
    except IntegrityError:
        raise TakenError(f"the {_noun(table)} name {name!r} is taken; choose another") from None
    if not changed:
        raise MissingError(f"there is no {_noun(table)} {identifier}")


def _noun(table: Table) -> str:
    return table.name.removeprefix("app_")
