"""`/orgs`: who pays."""

from uuid import UUID

import msgspec
from litestar import Response, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from msgspec import UNSET, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import directory, people
from billing.directory import Org
from billing.invoices import set_billing_time_zone
from gateway.admin.access import needs, refuse_other_org
from gateway.admin.paging import Listing, Page, listing
from gateway.admin.writing import Admin, Writer


class Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class OrgChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is not named stays."""

    name: str | UnsetType = UNSET
    billing_time_zone: str | UnsetType = UNSET
    """On whose clock its months begin."""


@get("/orgs", opt=needs("read"))
async def list_orgs(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[Org]:
    """Organisations, oldest first."""
    async with admin.read() as conn:
        found = await directory.list_orgs(conn, only=admin.caller.org_id, after=page.after_id, limit=page.limit + 1)
    return listing(found, page, lambda org: org.id)


@post("/orgs", opt=needs("manage", everywhere=True))
async def create_org(writer: NamedDependency[Writer], data: JSONBody[Name]) -> Response[Org]:
    async def work(conn: AsyncConnection) -> Org:
        return await directory.get_org(conn, await people.create_org(conn, data.name))

    return await writer.write(work)


@get("/orgs/{org_id:uuid}", opt=needs("read"))
async def get_org(admin: NamedDependency[Admin], org_id: FromPath[UUID]) -> Org:
    refuse_other_org(admin.caller, org_id)
    async with admin.read() as conn:
        return await directory.get_org(conn, org_id)


@patch("/orgs/{org_id:uuid}", opt=needs("manage"))
async def change_org(
    writer: NamedDependency[Writer], org_id: FromPath[UUID], data: JSONBody[OrgChange]
) -> Response[Org]:
    """Rename it, or let its months begin elsewhere; what it spent stays its own."""
    refuse_other_org(writer.caller, org_id)

    async def work(conn: AsyncConnection) -> Org:
        if data.name is not UNSET:
            await directory.rename_org(conn, org_id, data.name)
        if data.billing_time_zone is not UNSET:
            await set_billing_time_zone(conn, org_id, data.billing_time_zone)
        return await directory.get_org(conn, org_id)

    return await writer.write(work)


ROUTES = [list_orgs, create_org, get_org, change_org]
