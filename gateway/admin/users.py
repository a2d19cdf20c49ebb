"""`/users`: people, or programs, that keys are given to."""

from uuid import UUID

import msgspec
from litestar import Response, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import UNSET, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import directory, people
from billing.directory import User
from gateway.admin.access import needs, refuse_other_org
from gateway.admin.paging import Listing, Page, listing
from gateway.admin.writing import Admin, Writer


class NewUser(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    org_id: UUID
    name: str
    team_id: UUID | None = None


class UserChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is not named stays."""

    name: str | UnsetType = UNSET
    team_id: UUID | UnsetType | None = UNSET
    """null: in no team."""


@get("/users", opt=needs("read"))
async def list_users(
    admin: NamedDependency[Admin],
    page: NamedDependency[Page],
    org_id: FromQuery[UUID | None] = None,
    team_id: FromQuery[UUID | None] = None,
) -> Listing[User]:
    """Users, oldest first; of one organisation or team where given."""
    wanted = admin.org(org_id)
    async with admin.read() as conn:
        found = await directory.list_users(
            conn, org_id=wanted, team_id=team_id, after=page.after_id, limit=page.limit + 1
        )
    return listing(found, page, lambda user: user.id)


@post("/users", opt=needs("manage"))
async def create_user(writer: NamedDependency[Writer], data: JSONBody[NewUser]) -> Response[User]:
    refuse_other_org(writer.caller, data.org_id)

    async def work(conn: AsyncConnection) -> User:
        made = await people.create_user(conn, data.org_id, data.name, data.team_id)
        return await directory.get_user(conn, made)

    return await writer.write(work)


@get("/users/{user_id:uuid}", opt=needs("read"))
async def get_user(admin: NamedDependency[Admin], user_id: FromPath[UUID]) -> User:
    async with admin.read() as conn:
        user = await directory.get_user(conn, user_id)
    refuse_other_org(admin.caller, user.org_id)
    return user


@patch("/users/{user_id:uuid}", opt=needs("manage"))
async def change_user(
    writer: NamedDependency[Writer], user_id: FromPath[UUID], data: JSONBody[UserChange]
) -> Response[User]:
    """Rename a user, or move them to another team; what they spent stays with the team that it was spent in."""

    async def work(conn: AsyncConnection) -> User:
        refuse_other_org(writer.caller, (await directory.get_user(conn, user_id)).org_id)
        if data.name is not UNSET:
            await directory.rename_user(conn, user_id, data.name)
        if data.team_id is not UNSET:
            await directory.move_user(conn, user_id, data.team_id)
        return await directory.get_user(conn, user_id)

    return await writer.write(work)


ROUTES = [list_users, create_user, get_user, change_user]
