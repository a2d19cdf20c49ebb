"""`/administrators` and their `/tokens`: only owners see and change them."""

from datetime import datetime
from uuid import UUID

import msgspec
from litestar import Response, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import administrators
from billing.administrators import Administrator, Token
from billing.people import MissingError
from billing.roles import RIGHTS, Right, Role
from gateway.admin.access import needs
from gateway.admin.moments import moment
from gateway.admin.paging import Listing, Page, listing
from gateway.admin.writing import Admin, Writer


class Me(msgspec.Struct, frozen=True, kw_only=True):
    actor: str
    """As the audit log names the caller."""
    role: Role
    rights: list[Right]
    org_id: UUID | None
    user_id: UUID | None


class NewAdministrator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    role: Role
    email: str | None = None
    """With which they sign in at the OIDC provider."""
    org_id: UUID | None = None
    """The only organisation they see; null: all."""
    user_id: UUID | None = None
    """Of a member: which user they are."""


class NewRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Role


class NewToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    administrator_id: UUID
    name: str
    role: Role | None = None
    """The most that it may do; null: all that its administrator may."""
    expires_at: datetime | None = None


class TokenWithSecret(Token, frozen=True, kw_only=True):
    token: str
    """The secret: shown this once."""


@get("/me", opt=needs("own"), sync_to_thread=False)
def me(admin: NamedDependency[Admin]) -> Me:
    """Who calls, and what they may do."""
    caller = admin.caller
    return Me(
        actor=caller.actor,
        role=caller.role,
        rights=sorted(RIGHTS[caller.role]),
        org_id=caller.org_id,
        user_id=caller.user_id,
    )


@get("/administrators", opt=needs("administer"))
async def list_administrators(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[Administrator]:
    """Administrators, the revoked too, oldest first."""
    async with admin.read() as conn:
        found = await administrators.list_administrators(conn, after=page.after_id, limit=page.limit + 1)
    return listing(found, page, lambda each: each.id)


@post("/administrators", opt=needs("administer"))
async def create_administrator(
    writer: NamedDependency[Writer], data: JSONBody[NewAdministrator]
) -> Response[Administrator]:
    async def work(conn: AsyncConnection) -> Administrator:
        made = await administrators.create_administrator(
            conn, data.name, data.role, email=data.email, org_id=data.org_id, user_id=data.user_id
        )
        return await administrators.get_administrator(conn, str(made))

    return await writer.write(work)


@get("/administrators/{administrator_id:uuid}", opt=needs("administer"))
async def get_administrator(admin: NamedDependency[Admin], administrator_id: FromPath[UUID]) -> Administrator:
    async with admin.read() as conn:
        return await administrators.get_administrator(conn, str(administrator_id))


@patch("/administrators/{administrator_id:uuid}", opt=needs("administer"))
async def change_role(
    writer: NamedDependency[Writer], administrator_id: FromPath[UUID], data: JSONBody[NewRole]
) -> Response[Administrator]:
    """Give an administrator another role, from now on."""

    async def work(conn: AsyncConnection) -> Administrator:
        await administrators.change_role(conn, administrator_id, data.role)
        return await administrators.get_administrator(conn, str(administrator_id))

    return await writer.write(work)


@post("/administrators/{administrator_id:uuid}/revoke", opt=needs("administer"), status_code=200)
async def revoke_administrator(
    writer: NamedDependency[Writer], administrator_id: FromPath[UUID]
) -> Response[Administrator]:
    """End an administrator's sessions and tokens, now."""

    async def work(conn: AsyncConnection) -> Administrator:
        await administrators.revoke_administrator(conn, administrator_id)
        return await administrators.get_administrator(conn, str(administrator_id))

    return await writer.write(work)


@get("/tokens", opt=needs("administer"))
async def list_tokens(
    admin: NamedDependency[Admin], page: NamedDependency[Page], administrator_id: FromQuery[UUID | None] = None
) -> Listing[Token]:
    """Tokens, the ended too, oldest first; of one administrator where given."""
    async with admin.read() as conn:
        found = await administrators.list_tokens(
            conn, administrator_id=administrator_id, after=page.after_id, limit=page.limit + 1
        )
    return listing(found, page, lambda token: token.id)


@post("/tokens", opt=needs("administer"))
async def create_token(writer: NamedDependency[Writer], data: JSONBody[NewToken]) -> Response[TokenWithSecret]:
    async def work(conn: AsyncConnection) -> TokenWithSecret:
        made = await administrators.create_token(
            conn, data.administrator_id, data.name, role=data.role, expires_at=moment(data.expires_at)
        )
        token = await administrators.get_token(conn, made.id)
        return TokenWithSecret(**msgspec.structs.asdict(token), token=made.secret)

    return await writer.write(work)


@post("/tokens/{token_id:uuid}/revoke", opt=needs("administer"), status_code=200)
async def revoke_token(writer: NamedDependency[Writer], token_id: FromPath[UUID]) -> Response[Token]:
    """Refuse a token from now on."""

    async def work(conn: AsyncConnection) -> Token:
        if not await administrators.revoke_token(conn, token_id):
            raise MissingError(f"there is no token {token_id}")
        return await administrators.get_token(conn, token_id)

    return await writer.write(work)


ROUTES = [
    me,
    *(list_administrators, create_administrator, get_administrator, change_role, revoke_administrator),
    *(list_tokens, create_token, revoke_token),
]
