"""`/budgets` and `/limits`: what a scope may use up."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Protocol, TypeVar
from uuid import UUID

import msgspec
from litestar import Response, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import budgets, directory, limits
from billing.allowances import LimitKind, ScopeKind
from billing.budgets import Budget
from billing.limits import Limit
from billing.people import MissingError
from billing.prices import billing_currency
from billing.windows import Window
from gateway.admin.access import needs, refuse_other_org
from gateway.admin.paging import Listing, Page, cut
from gateway.admin.writing import Admin, Writer


class OfScope(Protocol):
    @property
    def id(self) -> UUID: ...
    @property
    def scope_kind(self) -> ScopeKind: ...
    @property
    def scope_id(self) -> str: ...


Thing = TypeVar("Thing", bound=OfScope)


class BudgetTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    scope_kind: ScopeKind
    scope_id: str
    """The id of the org, team, user or key; a model's name; a tag as `name=value`."""
    window: Window
    limit_amount: Decimal
    currency: str | None = None
    """null: what the gateway bills in."""
    time_zone: str = "UTC"
    hard: bool = True


class LimitTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    scope_kind: ScopeKind
    scope_id: str
    kind: LimitKind
    limit: int


@get("/budgets", opt=needs("read"))
async def list_budgets(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[Budget]:
    """Budgets with what their current windows hold, oldest first."""
    async with admin.read() as conn:
        return cut(await _own(admin, conn, await budgets.list_budgets(conn)), page, lambda budget: budget.id)


@put("/budgets", opt=needs("manage"))
async def set_budget(writer: NamedDependency[Writer], data: JSONBody[BudgetTerms]) -> Response[Budget]:
    """Make the scope's budget for this kind of window, or change the one there is."""

    async def work(conn: AsyncConnection) -> Budget:
        refuse_other_org(writer.caller, await directory.org_of_scope(conn, data.scope_kind, data.scope_id))
        made = await budgets.set_budget(
            conn,
            data.scope_kind,
            data.scope_id,
            data.window,
            data.limit_amount,
            currency=await _currency(conn, data.currency),
            time_zone=data.time_zone,
            hard=data.hard,
        )
        return next(each for each in await budgets.list_budgets(conn) if each.id == made)

    return await writer.write(work)


@delete("/budgets/{budget_id:uuid}", opt=needs("manage"), status_code=204)
async def remove_budget(writer: NamedDependency[Writer], budget_id: FromPath[UUID]) -> Response[None]:
    """Forget a budget; the ledger keeps what was spent."""

    async def work(conn: AsyncConnection) -> None:
        await _find(writer, conn, await budgets.list_budgets(conn), budget_id)
        await budgets.remove_budget(conn, budget_id)

    return await writer.write(work)


@get("/limits", opt=needs("read"))
async def list_limits(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[Limit]:
    """Limits, oldest first."""
    async with admin.read() as conn:
        return cut(await _own(admin, conn, await limits.list_limits(conn)), page, lambda limit: limit.id)


@put("/limits", opt=needs("manage"))
async def set_limit(writer: NamedDependency[Writer], data: JSONBody[LimitTerms]) -> Response[Limit]:
    """Make the scope's limit of this kind, or change the one there is."""

    async def work(conn: AsyncConnection) -> Limit:
        refuse_other_org(writer.caller, await directory.org_of_scope(conn, data.scope_kind, data.scope_id))
        made = await limits.set_limit(conn, data.scope_kind, data.scope_id, data.kind, data.limit)
        return next(each for each in await limits.list_limits(conn) if each.id == made)

    return await writer.write(work)


@delete("/limits/{limit_id:uuid}", opt=needs("manage"), status_code=204)
async def remove_limit(writer: NamedDependency[Writer], limit_id: FromPath[UUID]) -> Response[None]:
    """Forget a limit."""

    async def work(conn: AsyncConnection) -> None:
        await _find(writer, conn, await limits.list_limits(conn), limit_id)
        await limits.remove_limit(conn, limit_id)

    return await writer.write(work)


ROUTES = [list_budgets, set_budget, remove_budget, list_limits, set_limit, remove_limit]


async def _own(admin: Admin, conn: AsyncConnection, found: Sequence[Thing]) -> list[Thing]:
    """Those in the caller's organisation."""
    if admin.caller.org_id is None:
        return list(found)
    scopes = await directory.scopes_of_org(conn, admin.caller.org_id)
    return [each for each in found if each.scope_id in scopes]


async def _find(admin: Admin, conn: AsyncConnection, found: Sequence[Thing], identifier: UUID) -> None:
    """Raises MissingError when it is not there, or not the caller's to see."""
    if not any(each.id == identifier for each in await _own(admin, conn, found)):
        raise MissingError(f"there is no such thing as {identifier}")


async def _currency(conn: AsyncConnection, given: str | None) -> str:
    billed = await billing_currency(conn)
    if billed is None and given is None:
        raise ValueError("this database has no prices yet; start a gateway with prices, or give the currency")
    if billed is not None and given not in (None, billed):
        raise ValueError(f"the gateway bills in {billed}; a budget in {given} could not be compared with its charges")
    return billed or str(given)
