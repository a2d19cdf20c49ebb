"""`/budgets` and `/limits`: what a scope may use up."""

from decimal import Decimal
from uuid import UUID

import msgspec
from litestar import Response, delete, get, put
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import budgets, limits
from billing.allowances import LimitKind, ScopeKind
from billing.budgets import Budget
from billing.limits import Limit
from billing.windows import Window
from gateway.admin.access import needs
from gateway.admin.paging import Listing, Page, cut
from gateway.admin.scopes import charged_in, find, own, refuse_other_scope, refuse_whole
from gateway.admin.writing import Admin, Writer


class BudgetTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    scope_kind: ScopeKind
    scope_id: str
    """The id of the org, team, user or key; a model's name; a tag as `name=value`."""
    also: dict[ScopeKind, str] = {}
    """Further scopes: only calls that have all of them count."""
    window: Window
    limit_amount: Decimal
    currency: str | None = None
    """null: what the gateway bills in."""
    time_zone: str = "UTC"
    hard: bool = True
    rollover: bool = False
    rollover_cap: Decimal | None = None


class LimitTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    scope_kind: ScopeKind
    scope_id: str
    also: dict[ScopeKind, str] = {}
    kind: LimitKind
    limit: int


@get("/budgets", opt=needs("read"))
async def list_budgets(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[Budget]:
    """Budgets with what their current windows hold, oldest first."""
    async with admin.read() as conn:
        return cut(await own(admin.caller, conn, await budgets.list_budgets(conn)), page, lambda budget: budget.id)


@put("/budgets", opt=needs("manage"))
async def set_budget(writer: NamedDependency[Writer], data: JSONBody[BudgetTerms]) -> Response[Budget]:
    """Make the scope's budget for this kind of window, or change the one there is."""

    async def work(conn: AsyncConnection) -> Budget:
        await refuse_other_scope(conn, writer.caller, data.scope_kind, data.scope_id, data.also)
        made = await budgets.set_budget(
            conn,
            data.scope_kind,
            data.scope_id,
            data.window,
            data.limit_amount,
            currency=await charged_in(conn, data.currency),
            time_zone=data.time_zone,
            also=data.also or None,
            hard=data.hard,
            rollover=data.rollover,
            rollover_cap=data.rollover_cap,
        )
        return next(each for each in await budgets.list_budgets(conn) if each.id == made)

    return await writer.write(work)


@delete("/budgets/{budget_id:uuid}", opt=needs("manage"), status_code=204)
async def remove_budget(writer: NamedDependency[Writer], budget_id: FromPath[UUID]) -> Response[None]:
    """Forget a budget; the ledger keeps what was spent."""

    async def work(conn: AsyncConnection) -> None:
        found = await own(writer.caller, conn, await budgets.list_budgets(conn))
        refuse_whole(writer.caller, find(found, budget_id))
        await budgets.remove_budget(conn, budget_id)

    return await writer.write(work)


@get("/limits", opt=needs("read"))
async def list_limits(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[Limit]:
    """Limits, oldest first."""
    async with admin.read() as conn:
        return cut(await own(admin.caller, conn, await limits.list_limits(conn)), page, lambda limit: limit.id)


@put("/limits", opt=needs("manage"))
async def set_limit(writer: NamedDependency[Writer], data: JSONBody[LimitTerms]) -> Response[Limit]:
    """Make the scope's limit of this kind, or change the one there is."""

    async def work(conn: AsyncConnection) -> Limit:
        await refuse_other_scope(conn, writer.caller, data.scope_kind, data.scope_id, data.also)
        made = await limits.set_limit(
            conn, data.scope_kind, data.scope_id, data.kind, data.limit, also=data.also or None
        )
        return next(each for each in await limits.list_limits(conn) if each.id == made)

    return await writer.write(work)


@delete("/limits/{limit_id:uuid}", opt=needs("manage"), status_code=204)
async def remove_limit(writer: NamedDependency[Writer], limit_id: FromPath[UUID]) -> Response[None]:
    """Forget a limit."""

    async def work(conn: AsyncConnection) -> None:
        found = await own(writer.caller, conn, await limits.list_limits(conn))
        refuse_whole(writer.caller, find(found, limit_id))
        await limits.remove_limit(conn, limit_id)

    return await writer.write(work)


ROUTES = [list_budgets, set_budget, remove_budget, list_limits, set_limit, remove_limit]
