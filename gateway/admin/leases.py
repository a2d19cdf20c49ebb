"""`/leases`: what gateways have taken out of budgets in advance, and freeing it where one is gone for good."""

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.lost_replicas import ReplicaLeases, free_leases, list_leases
from gateway.admin.access import needs
from gateway.admin.paging import Listing, Page, cut_by_name
from gateway.admin.writing import Admin, Writer


class LostReplica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    replica: str


class Freed(msgspec.Struct, frozen=True):
    leases: int
    """How many had something left."""


@get("/leases", opt=needs("read", everywhere=True))
async def list_all(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[ReplicaLeases]:
    """The gateway processes that have leases, by name: when they were heard of changes from page to page."""
    async with admin.read() as conn:
        return cut_by_name(await list_leases(conn), page, lambda leases: leases.replica)


@post("/leases/free", opt=needs("manage", everywhere=True), status_code=200)
async def free(writer: NamedDependency[Writer], data: JSONBody[LostReplica]) -> Response[Freed]:
    """Free what a process has leased whose spool is lost. Where the spool can still be read, start a gateway on it
    instead: what was spooled and never copied is charged to nobody then."""

    async def work(conn: AsyncConnection) -> Freed:
        return Freed(await free_leases(conn, data.replica))

    return await writer.write(work)


ROUTES = [list_all, free]
