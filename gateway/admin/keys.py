"""`/keys`: virtual keys. A secret is in the answer that makes it, and nowhere else."""

from datetime import datetime, timedelta
from typing import Annotated
from uuid import UUID

import msgspec
from litestar import Response, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import UNSET, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import people
from billing.people import KeyInfo, NewSecret
from billing.restrictions import Restrictions, networks
from gateway.admin.access import needs, refuse_other_org
from gateway.admin.moments import moment
from gateway.admin.paging import Listing, Page, listing
from gateway.admin.writing import Admin, Writer
from gateway.errors import ApiError

LONGEST_OVERLAP_HOURS = 24 * 365


class Key(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    prefix: str
    name: str
    org_id: UUID
    org: str
    team: str | None
    user_id: UUID | None
    user: str | None
    models: list[str] | None
    """Names it may ask for; null: any."""
    routes: list[str] | None
    """Interfaces it may use; null: any."""
    networks: list[str] | None
    """Where it may be used from; null: anywhere."""
    tags: dict[str, str]
    """On all its operations."""
    may_attribute: bool
    """Whether its callers' own tags are taken."""
    record_payloads: bool
    """Whether the bodies of its requests and answers are kept."""
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    old_secret_works_until: datetime | None


class KeyWithSecret(Key, frozen=True, kw_only=True):
    key: str
    """The secret: shown this once."""


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    org_id: UUID
    name: str
    team_id: UUID | None = None
    user_id: UUID | None = None
    expires_at: datetime | None = None
    models: list[str] | None = None
    routes: list[str] | None = None
    networks: list[str] | None = None
    tags: dict[str, str] = {}
    may_attribute: bool = False
    record_payloads: bool = False


class KeyChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is not named stays; null lifts a restriction."""

    expires_at: datetime | UnsetType | None = UNSET
    models: list[str] | UnsetType | None = UNSET
    routes: list[str] | UnsetType | None = UNSET
    networks: list[str] | UnsetType | None = UNSET
    tags: dict[str, str] | UnsetType = UNSET
    may_attribute: bool | UnsetType = UNSET
    record_payloads: bool | UnsetType = UNSET


class Rotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    overlap_hours: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_OVERLAP_HOURS)] = 24
    """How long the old secret works beside the new one."""


@get("/keys", opt=needs("own"))
async def list_keys(
    admin: NamedDependency[Admin],
    page: NamedDependency[Page],
    org_id: FromQuery[UUID | None] = None,
    user_id: FromQuery[UUID | None] = None,
) -> Listing[Key]:
    """Keys, oldest first; of one organisation or user where given. A member sees their own."""
    of_org, of_user = admin.org(org_id), admin.user(user_id)
    async with admin.read() as conn:
        found = await people.list_keys(conn, org_id=of_org, user_id=of_user, after=page.after_id, limit=page.limit + 1)
    return listing([_key(each) for each in found], page, lambda key: key.id)


@post("/keys", opt=needs("manage"))
async def create_key(writer: NamedDependency[Writer], data: JSONBody[NewKey]) -> Response[KeyWithSecret]:
    refuse_other_org(writer.caller, data.org_id)

    async def work(conn: AsyncConnection) -> KeyWithSecret:
        secret = await people.create_key(
            conn,
            data.org_id,
            data.name,
            team_id=data.team_id,
            user_id=data.user_id,
            expires_at=moment(data.expires_at),
            restrictions=Restrictions(
                models=_names(data.models),
                routes=_names(data.routes),
                networks=None if data.networks is None else networks(data.networks),
                tags=data.tags,
                may_attribute=data.may_attribute,
                record_payloads=data.record_payloads,
            ),
        )
        return await _with_secret(conn, secret)

    return await writer.write(work)


@get("/keys/{key_id:uuid}", opt=needs("own"))
async def get_key(admin: NamedDependency[Admin], key_id: FromPath[UUID]) -> Key:
    async with admin.read() as conn:
        return _key(await _visible(admin, conn, key_id))


@patch("/keys/{key_id:uuid}", opt=needs("manage"))
async def change_key(
    writer: NamedDependency[Writer], key_id: FromPath[UUID], data: JSONBody[KeyChange]
) -> Response[Key]:
    """Change what a key may be used for, and until when."""

    async def work(conn: AsyncConnection) -> Key:
        before = await _visible(writer, conn, key_id)
        ranges = data.networks
        after = Restrictions(
            models=before.models if data.models is UNSET else _names(data.models),
            routes=before.routes if data.routes is UNSET else _names(data.routes),
            networks=before.networks if ranges is UNSET else None if ranges is None else networks(ranges),
            tags=before.tags if data.tags is UNSET else data.tags,
            may_attribute=before.may_attribute if data.may_attribute is UNSET else data.may_attribute,
            record_payloads=before.record_payloads if data.record_payloads is UNSET else data.record_payloads,
        )
        await people.restrict_key(conn, key_id, after)
        if data.expires_at is not UNSET:
            await people.expire_key(conn, key_id, moment(data.expires_at))
        return _key(await people.get_key(conn, str(key_id)))

    return await writer.write(work)


@post("/keys/{key_id:uuid}/rotate", opt=needs("manage"), status_code=200)
async def rotate_key(
    writer: NamedDependency[Writer], key_id: FromPath[UUID], data: JSONBody[Rotation]
) -> Response[KeyWithSecret]:
    """Give a key a new secret; the old one works for a while more."""

    async def work(conn: AsyncConnection) -> KeyWithSecret:
        await _visible(writer, conn, key_id)
        secret = await people.rotate_key(conn, key_id, timedelta(hours=data.overlap_hours))
        assert secret is not None, "it was there within this transaction"
        return await _with_secret(conn, secret)

    return await writer.write(work)


@post("/keys/{key_id:uuid}/revoke", opt=needs("manage"), status_code=200)
async def revoke_key(writer: NamedDependency[Writer], key_id: FromPath[UUID]) -> Response[Key]:
    """Refuse a key from now on, with all its secrets."""

    async def work(conn: AsyncConnection) -> Key:
        await _visible(writer, conn, key_id)
        await people.revoke_key(conn, key_id)
        return _key(await people.get_key(conn, str(key_id)))

    return await writer.write(work)


ROUTES = [list_keys, create_key, get_key, change_key, rotate_key, revoke_key]


async def _visible(admin: Admin, conn: AsyncConnection, key_id: UUID) -> KeyInfo:
    key = await people.get_key(conn, str(key_id))
    refuse_other_org(admin.caller, key.org_id)
    if admin.caller.user_id not in (None, key.user_id):
        raise ApiError(404, "not_found", "You have no such key.")
    return key


async def _with_secret(conn: AsyncConnection, secret: NewSecret) -> KeyWithSecret:
    key = _key(await people.get_key(conn, str(secret.id)))
    return KeyWithSecret(**msgspec.structs.asdict(key), key=secret.secret)


def _key(info: KeyInfo) -> Key:
    return Key(
        id=info.key_id,
        prefix=info.prefix,
        name=info.name,
        org_id=info.org_id,
        org=info.org,
        team=info.team,
        user_id=info.user_id,
        user=info.user,
        models=None if info.models is None else sorted(info.models),
        routes=None if info.routes is None else sorted(info.routes),
        networks=None if info.networks is None else [str(each) for each in info.networks],
        tags=info.tags,
        may_attribute=info.may_attribute,
        record_payloads=info.record_payloads,
        created_at=info.created_at,
        expires_at=info.expires_at,
        revoked_at=info.revoked_at,
        old_secret_works_until=info.replaces_until,
    )


def _names(given: list[str] | None) -> frozenset[str] | None:
    return None if given is None else frozenset(given)
