"""`/teams`: parts of an organisation."""

from uuid import UUID

import msgspec
from litestar import Response, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import directory, people
from billing.directory import Team
from gateway.admin.access import needs, refuse_other_org
from gateway.admin.orgs import Name
from gateway.admin.paging import Listing, Page, listing
from gateway.admin.writing import Admin, Writer


class NewTeam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    org_id: UUID
    name: str


@get("/teams", opt=needs("read"))
async def list_teams(
    admin: NamedDependency[Admin], page: NamedDependency[Page], org_id: FromQuery[UUID | None] = None
) -> Listing[Team]:
    """Teams, oldest first; of one organisation where given."""
    wanted = admin.org(org_id)
    async with admin.read() as conn:
        found = await directory.list_teams(conn, org_id=wanted, after=page.after_id, limit=page.limit + 1)
    return listing(found, page, lambda team: team.id)


@post("/teams", opt=needs("manage"))
async def create_team(writer: NamedDependency[Writer], data: JSONBody[NewTeam]) -> Response[Team]:
    refuse_other_org(writer.caller, data.org_id)

    async def work(conn: AsyncConnection) -> Team:
        return await directory.get_team(conn, await people.create_team(conn, data.org_id, data.name))

    return await writer.write(work)


@get("/teams/{team_id:uuid}", opt=needs("read"))
async def get_team(admin: NamedDependency[Admin], team_id: FromPath[UUID]) -> Team:
    async with admin.read() as conn:
        team = await directory.get_team(conn, team_id)
    refuse_other_org(admin.caller, team.org_id)
    return team


@patch("/teams/{team_id:uuid}", opt=needs("manage"))
async def rename_team(writer: NamedDependency[Writer], team_id: FromPath[UUID], data: JSONBody[Name]) -> Response[Team]:
    """Rename it; what it spent stays its own."""

    async def work(conn: AsyncConnection) -> Team:
        refuse_other_org(writer.caller, (await directory.get_team(conn, team_id)).org_id)
        await directory.rename_team(conn, team_id, data.name)
        return await directory.get_team(conn, team_id)

    return await writer.write(work)


ROUTES = [list_teams, create_team, get_team, rename_team]
