"""Organisations, teams, users and their virtual keys. Of a key only its SHA-256 and first characters are stored."""

import hashlib
import secrets
from datetime import datetime
from uuid import UUID

import msgspec
from sqlalchemy import Table, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ids import new_id
from billing.tables import api_key, app_user, org, team

KEY_PREFIX = "fk-"
_KEY_BYTES = 32
_SHOWN_CHARACTERS = 8


class PeopleError(ValueError):
    """A name is taken, or a team or user is not in the organisation; the message says which."""


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a key speaks for. The caller decides what `expires_at` and `revoked_at` mean for a request."""

    key_id: UUID
    org_id: UUID
    team_id: UUID | None
    """The key's own team, else its user's."""
    user_id: UUID | None
    name: str
    """The key's name, not secret."""
    expires_at: datetime | None
    revoked_at: datetime | None


class NewKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key just made. `secret` is here and nowhere else, so its repr does not show it."""

    id: UUID
    prefix: str
    secret: str

    def __repr__(self) -> str:
        return f"NewKey(id={self.id!r}, prefix={self.prefix!r})"


class KeyInfo(Principal, frozen=True, kw_only=True):
    """What a list of keys shows."""

    prefix: str
    created_at: datetime


def key_hash(secret: str) -> bytes:
    """SHA-256 of a key. A plain hash is enough: the key has 256 random bits, so there is nothing to guess."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


async def create_org(conn: AsyncConnection, name: str) -> UUID:
    """Raises PeopleError when the name is taken or empty, as do the next two."""
    return await _create(conn, org, name)


async def create_team(conn: AsyncConnection, org_id: UUID, name: str) -> UUID:
    await _require(conn, org, org_id)
    return await _create(conn, team, name, org_id=org_id)


async def create_user(conn: AsyncConnection, org_id: UUID, name: str, team_id: UUID | None = None) -> UUID:
    await _require(conn, org, org_id)
    await _require(conn, team, team_id, org_id)
    return await _create(conn, app_user, name, org_id=org_id, team_id=team_id)


async def find_org(conn: AsyncConnection, name: str) -> UUID | None:
    return (await conn.execute(select(org.c.id).where(org.c.name == name))).scalar_one_or_none()


async def find_team(conn: AsyncConnection, org_id: UUID, name: str) -> UUID | None:
    query = select(team.c.id).where(team.c.org_id == org_id, team.c.name == name)
    return (await conn.execute(query)).scalar_one_or_none()


async def find_user(conn: AsyncConnection, org_id: UUID, name: str) -> UUID | None:
    query = select(app_user.c.id).where(app_user.c.org_id == org_id, app_user.c.name == name)
    return (await conn.execute(query)).scalar_one_or_none()


async def create_key(
    conn: AsyncConnection,
    org_id: UUID,
    name: str,
    *,
    team_id: UUID | None = None,
    user_id: UUID | None = None,
    expires_at: datetime | None = None,
) -> NewKey:
    """Make a virtual key and return it with its secret, this once. Names need not be unique.

    Raises PeopleError when the team or the user is not in the organisation.
    """
    await _require(conn, org, org_id)
    await _require(conn, team, team_id, org_id)
    await _require(conn, app_user, user_id, org_id)
    secret = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    key = NewKey(id=new_id(), prefix=secret[:_SHOWN_CHARACTERS], secret=secret)
    await conn.execute(
        insert(api_key).values(
            id=key.id,
            org_id=org_id,
            team_id=team_id,
            user_id=user_id,
            name=_checked(name),
            prefix=key.prefix,
            hash=key_hash(secret),
            expires_at=expires_at,
        )
    )
    return key


_PRINCIPAL = (
    api_key.c.id.label("key_id"),
    api_key.c.org_id,
    func.coalesce(api_key.c.team_id, app_user.c.team_id).label("team_id"),
    api_key.c.user_id,
    api_key.c.name,
    api_key.c.expires_at,
    api_key.c.revoked_at,
)
_KEY_AND_USER = api_key.outerjoin(app_user, app_user.c.id == api_key.c.user_id)


async def find_key(conn: AsyncConnection, secret: str) -> Principal | None:
    """Whom `secret` speaks for, revoked and expired keys included; None when no such key was ever made."""
    query = select(*_PRINCIPAL).select_from(_KEY_AND_USER).where(api_key.c.hash == key_hash(secret))
    row = (await conn.execute(query)).mappings().one_or_none()
    return None if row is None else Principal(**row)


async def revoke_key(conn: AsyncConnection, key_id: UUID) -> bool:
    """Revoke from now on; False when there is no such key. A second call keeps the first time."""
    revoked_at = func.coalesce(api_key.c.revoked_at, func.now())
    result = await conn.execute(update(api_key).where(api_key.c.id == key_id).values(revoked_at=revoked_at))
    return result.rowcount == 1


async def list_keys(conn: AsyncConnection, org_id: UUID | None = None) -> list[KeyInfo]:
    """Keys of one organisation, or of all, oldest first."""
    query = select(*_PRINCIPAL, api_key.c.prefix, api_key.c.created_at).select_from(_KEY_AND_USER)
    if org_id is not None:
        query = query.where(api_key.c.org_id == org_id)
    rows = await conn.execute(query.order_by(api_key.c.created_at, api_key.c.id))
    return [KeyInfo(**row) for row in rows.mappings()]


def _checked(name: str) -> str:
    if not name.strip() or "\x00" in name:
        raise PeopleError("a name needs at least one visible character and no NUL")
    return name


async def _create(conn: AsyncConnection, table: Table, name: str, **columns: UUID | None) -> UUID:
    # ON CONFLICT, not an error: a taken name must not abort the caller's transaction.
    row = insert(table).values(id=new_id(), name=_checked(name), **columns).on_conflict_do_nothing()
    made: UUID | None = (await conn.execute(row.returning(table.c.id))).scalar_one_or_none()
    if made is None:
        raise PeopleError(f"the {table.name.removeprefix('app_')} name {name!r} is taken; choose another")
    return made


async def _require(conn: AsyncConnection, table: Table, identifier: UUID | None, org_id: UUID | None = None) -> None:
    if identifier is None:
        return
    query = select(table.c.id).where(table.c.id == identifier)
    if org_id is not None:
        query = query.where(table.c.org_id == org_id)
    if (await conn.execute(query)).first() is None:
        where = "" if org_id is None else f" in organisation {org_id}"
        raise PeopleError(f"there is no {table.name.removeprefix('app_')} {identifier}{where}")
