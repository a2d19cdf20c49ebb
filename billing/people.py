"""Organisations, teams, users and their virtual keys. Of a secret only its SHA-256 and first characters are stored."""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Literal
from uuid import UUID

import msgspec
from sqlalchemy import (
    ARRAY,
    ColumnElement,
    LargeBinary,
    RowMapping,
    Table,
    and_,
    any_,
    bindparam,
    func,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.allowances import ScopeKind
from billing.ids import new_id
from billing.notices import notify
from billing.restrictions import Restrictions, check
from billing.tables import api_key, app_user, key_secret, org, team

KEY_PREFIX = "fk-"
KEYS_CHANNEL = "farthing_keys"
"""Notices here carry the id of a key that changed."""
UNRESTRICTED = Restrictions()
_KEY_BYTES = 32
_SHOWN_CHARACTERS = 8
LONGEST_NAME = 200
"""In characters: it stands in invoices, and in alerts' subjects."""
_BROKEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class PeopleError(ValueError):
    """A name is taken, or a team or user is not in the organisation; the message says which."""


class MissingError(PeopleError):
    """There is no such thing."""


class TakenError(PeopleError):
    """A name or an address that only one can have is somebody else's."""


class Principal(Restrictions, frozen=True, kw_only=True, dict=True):
    """Whom a secret speaks for, and what it may be used for."""

    key_id: UUID
    org_id: UUID
    team_id: UUID | None
    """The key's own team, else its user's."""
    user_id: UUID | None
    name: str
    """The key's name, not secret."""
    expires_at: datetime | None
    revoked_at: datetime | None
    replaced_at: datetime | None = None
    """When this secret ends because the key has a newer one; None for the newest."""

    @cached_property
    def scopes(self) -> Mapping[ScopeKind, tuple[str, ...]]:
        """Those that every call with this secret has, by their kind."""
        scopes: dict[ScopeKind, tuple[str, ...]] = {"org": (str(self.org_id),), "key": (str(self.key_id),)}
        if self.team_id is not None:
            scopes["team"] = (str(self.team_id),)
        if self.user_id is not None:
            scopes["user"] = (str(self.user_id),)
        return scopes

    def ended(self) -> Literal["revoked", "expired", "replaced"] | None:
        """Why the secret works no more; None while it does."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= datetime.now(UTC):
            return "expired"
        if self.replaced_at is not None and self.replaced_at <= datetime.now(UTC):
            return "replaced"
        return None


class NewSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A secret just made. `secret` is here and nowhere else, so its repr does not show it."""

    id: UUID
    """Of the key or token that it belongs to."""
    prefix: str
    secret: str

    def __repr__(self) -> str:
        return f"NewSecret(id={self.id!r}, prefix={self.prefix!r})"


class KeyInfo(Restrictions, frozen=True, kw_only=True):
    """A key as an operator sees it."""

    key_id: UUID
    prefix: str
    name: str
    org_id: UUID
    user_id: UUID | None
    org: str
    team: str | None
    """The key's own team, else its user's."""
    user: str | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    replaces_until: datetime | None
    """Until when an older secret works too; None when none does."""


_SHA256 = hashlib.sha256()


def key_hash(secret: str) -> bytes:
    """SHA-256 of a key. A plain hash is enough: the key has 256 random bits, so there is nothing to guess."""
    digest = _SHA256.copy()  # to look the algorithm up takes OpenSSL longer than the hash
    digest.update(secret.encode("utf-8", "surrogatepass"))
    return digest.digest()


async def create_org(conn: AsyncConnection, name: str) -> UUID:
    """Raises TakenError when there is one of that name, PeopleError when it is empty, as do the next two."""
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
    restrictions: Restrictions = UNRESTRICTED,
) -> NewSecret:
    """Make a virtual key and return it with its secret, this once. Names need not be unique.

    Raises PeopleError when the team or the user is not in the organisation, RestrictionError.
    """
    await _require(conn, org, org_id)
    await _require(conn, team, team_id, org_id)
    await _require(conn, app_user, user_id, org_id)
    key = new_secret(new_id())
    await conn.execute(
        insert(api_key).values(
            id=key.id,
            org_id=org_id,
            team_id=team_id,
            user_id=user_id,
            name=checked_name(name),
            prefix=key.prefix,
            expires_at=expires_at,
            **_columns(restrictions),
        )
    )
    await conn.execute(insert(key_secret).values(hash=key_hash(key.secret), key_id=key.id))
    return key


def new_secret(identifier: UUID, prefix: str = KEY_PREFIX, shown: int = _SHOWN_CHARACTERS) -> NewSecret:
    """256 random bits behind `prefix`; the first `shown` characters are no secret."""
    secret = prefix + secrets.token_urlsafe(_KEY_BYTES)
    return NewSecret(id=identifier, prefix=secret[:shown], secret=secret)


def _columns(restrictions: Restrictions) -> dict[str, Any]:
    check(restrictions)
    return {
        "models": None if restrictions.models is None else sorted(restrictions.models),
        "routes": None if restrictions.routes is None else sorted(restrictions.routes),
        "networks": None if restrictions.networks is None else list(restrictions.networks),
        "tags": restrictions.tags,
        "may_attribute": restrictions.may_attribute,
        "record_payloads": restrictions.record_payloads,
    }


def _restrictions(row: RowMapping) -> dict[str, Any]:
    """The opposite of `_columns`."""
    return {
        "models": None if row["models"] is None else frozenset(row["models"]),
        "routes": None if row["routes"] is None else frozenset(row["routes"]),
        "networks": None if row["networks"] is None else tuple(row["networks"]),
        "tags": row["tags"],
        "may_attribute": row["may_attribute"],
        "record_payloads": row["record_payloads"],
    }


_RESTRICTED = (
    *(api_key.c.models, api_key.c.routes, api_key.c.networks, api_key.c.tags),
    *(api_key.c.may_attribute, api_key.c.record_payloads),
)
_TEAM = func.coalesce(api_key.c.team_id, app_user.c.team_id)
_KEY_AND_USER = api_key.outerjoin(app_user, app_user.c.id == api_key.c.user_id)
_PRINCIPAL = (
    api_key.c.id.label("key_id"),
    api_key.c.org_id,
    _TEAM.label("team_id"),
    api_key.c.user_id,
    api_key.c.name,
    api_key.c.expires_at,
    api_key.c.revoked_at,
    *_RESTRICTED,
)
_FIND = (
    select(key_secret.c.hash, key_secret.c.ends_at.label("replaced_at"), *_PRINCIPAL)
    .select_from(_KEY_AND_USER.join(key_secret, key_secret.c.key_id == api_key.c.id))
    .where(key_secret.c.hash == any_(bindparam("hashes", type_=ARRAY(LargeBinary))))
)


async def find_keys(conn: AsyncConnection, hashes: Sequence[bytes]) -> dict[bytes, Principal]:
    """By hash of a secret, whom it speaks for; revoked, expired and replaced ones included."""
    return {row["hash"]: _principal(row) for row in (await conn.execute(_FIND, {"hashes": hashes})).mappings()}


def _principal(row: RowMapping) -> Principal:
    names = [name for name in Principal.__struct_fields__ if name in row and name not in Restrictions.__struct_fields__]
    return Principal(**{name: row[name] for name in names}, **_restrictions(row))


async def find_key(conn: AsyncConnection, secret: str) -> Principal | None:
    """Whom `secret` speaks for, as in `find_keys`; None when there never was such a key."""
    digest = key_hash(secret)
    return (await find_keys(conn, [digest])).get(digest)


async def find_principal(conn: AsyncConnection, key_id: UUID) -> Principal | None:
    """What a key itself stands for, whichever of its secrets is the newest: for what is done on its behalf later."""
    query = select(*_PRINCIPAL).select_from(_KEY_AND_USER).where(api_key.c.id == key_id)
    row = (await conn.execute(query)).mappings().one_or_none()
    return None if row is None else _principal(row)


async def revoke_key(conn: AsyncConnection, key_id: UUID) -> bool:
    """Revoke from now on; False when there is no such key. A second call keeps the first time."""
    return await _change(conn, key_id, revoked_at=func.coalesce(api_key.c.revoked_at, func.now()))


async def restrict_key(conn: AsyncConnection, key_id: UUID, restrictions: Restrictions) -> bool:
    """Put `restrictions` in place of those that the key had; False when there is no such key.

    Raises RestrictionError.
    """
    return await _change(conn, key_id, **_columns(restrictions))


async def expire_key(conn: AsyncConnection, key_id: UUID, expires_at: datetime | None) -> bool:
    """Let the key work until `expires_at`, or for ever; False when there is no such key."""
    return await _change(conn, key_id, expires_at=expires_at)


async def rotate_key(conn: AsyncConnection, key_id: UUID, overlap: timedelta) -> NewSecret | None:
    """Give the key a new secret; the one before works for `overlap` more. None when there is no such key.

    A secret that an earlier rotation replaced ends when it was to end, or with the overlap if that is sooner.
    Raises PeopleError when the key is revoked.
    """
    query = select(api_key.c.revoked_at).where(api_key.c.id == key_id).with_for_update()
    found = (await conn.execute(query)).one_or_none()
    if found is None:
        return None
    if found.revoked_at is not None:
        raise PeopleError("the key is revoked; make a new one")
    key = new_secret(key_id)
    await _change(conn, key_id, prefix=key.prefix)
    ends_at = func.least(key_secret.c.ends_at, func.now() + overlap)  # SQL's least passes over NULL
    await conn.execute(update(key_secret).where(key_secret.c.key_id == key_id).values(ends_at=ends_at))
    await conn.execute(insert(key_secret).values(hash=key_hash(key.secret), key_id=key_id))
    return key


async def _change(conn: AsyncConnection, key_id: UUID, **values: Any) -> bool:
    result = await conn.execute(update(api_key).where(api_key.c.id == key_id).values(**values))
    await notify(conn, KEYS_CHANNEL, str(key_id))
    return result.rowcount == 1


async def list_keys(
    conn: AsyncConnection,
    *,
    org_id: UUID | None = None,
    user_id: UUID | None = None,
    after: UUID | None = None,
    limit: int | None = None,
) -> list[KeyInfo]:
    """Keys, oldest first: of one organisation or user where given. `after` and `limit` cut out a page."""
    where = and_(
        true() if org_id is None else api_key.c.org_id == org_id,
        true() if user_id is None else api_key.c.user_id == user_id,
        true() if after is None else api_key.c.id > after,
    )
    return await _list(conn, where, limit)


async def get_key(conn: AsyncConnection, which: str) -> KeyInfo:
    """The key of that id or prefix. Raises MissingError when there is none, PeopleError when several share it."""
    try:
        found = await _list(conn, api_key.c.id == UUID(which))
    except ValueError:
        found = await _list(conn, api_key.c.prefix == which)
    if len(found) != 1:
        many = f"{len(found)} keys have the prefix {which!r}; give an id" if found else f"there is no key {which!r}"
        kind = PeopleError if found else MissingError
        raise kind(f"{many}; `farthing keys list` shows all")
    return found[0]


async def _list(conn: AsyncConnection, where: ColumnElement[bool], limit: int | None = None) -> list[KeyInfo]:
    older = select(func.max(key_secret.c.ends_at)).where(
        key_secret.c.key_id == api_key.c.id, key_secret.c.ends_at > func.now()
    )
    query = (
        select(
            api_key.c.id.label("key_id"),
            api_key.c.prefix,
            api_key.c.name,
            api_key.c.org_id,
            api_key.c.user_id,
            org.c.name.label("org"),
            team.c.name.label("team"),
            app_user.c.name.label("user"),
            api_key.c.created_at,
            api_key.c.expires_at,
            api_key.c.revoked_at,
            older.scalar_subquery().label("replaces_until"),
            *_RESTRICTED,
        )
        .select_from(_KEY_AND_USER.join(org, org.c.id == api_key.c.org_id).outerjoin(team, team.c.id == _TEAM))
        .where(where)
        .order_by(api_key.c.id)
        .limit(limit)
    )
    return [KeyInfo(**(dict(row) | _restrictions(row))) for row in (await conn.execute(query)).mappings()]


def checked_name(name: str) -> str:
    """Raises PeopleError for a name that nobody could read."""
    if not name.strip() or len(name) > LONGEST_NAME or _BROKEN.search(name):
        raise PeopleError(
            f"a name needs at least one visible character, at most {LONGEST_NAME} of them, and no line break, NUL or "
            "other control character"
        )
    return name


async def _create(conn: AsyncConnection, table: Table, name: str, **columns: UUID | None) -> UUID:
    # ON CONFLICT, not an error: a taken name must not abort the caller's transaction.
    row = insert(table).values(id=new_id(), name=checked_name(name), **columns).on_conflict_do_nothing()
    made: UUID | None = (await conn.execute(row.returning(table.c.id))).scalar_one_or_none()
    if made is None:
        raise TakenError(f"the {table.name.removeprefix('app_')} name {name!r} is taken; choose another")
    return made


async def _require(conn: AsyncConnection, table: Table, identifier: UUID | None, org_id: UUID | None = None) -> None:
    if identifier is None:
        return
    query = select(table.c.id).where(table.c.id == identifier)
    if org_id is not None:
        query = query.where(table.c.org_id == org_id)
    if (await conn.execute(query)).first() is None:
        where = "" if org_id is None else f" in organisation {org_id}"
        raise MissingError(f"there is no {table.name.removeprefix('app_')} {identifier}{where}")
