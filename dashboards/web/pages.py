"""The pages that show data. Each reads in one snapshot of the ledger and renders one template."""

from collections.abc import Iterable
from datetime import UTC, datetime
from uuid import UUID

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.exceptions import NotFoundException, ValidationException
from litestar.params import FromPath, FromQuery
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.explanation import Amount, explain
from billing.operations import (
    OperationPage,
    latest_operations,
    operations_after,
    operations_before,
)
from billing.reports import Within
from billing.roles import Caller
from dashboards.web.names import CLASS_NAMES, PART_NAMES
from dashboards.web.overview import PERIODS, Period, gather
from dashboards.web.site import AnyRequest, Site
from dashboards.web.timeline import first_token, timeline
from dashboards.web.usage import gather as gather_usage

LATEST = 100


@get("/")
async def overview(
    request: AnyRequest, site: NamedDependency[Site], period: FromQuery[str] = PERIODS[-1].slug
) -> Response[str]:
    """Spending, tokens, models and users in `period` (`today`, `7d` or `30d`)."""
    chosen = _period(period)
    async with site.read() as connection:
        view = await gather(connection, chosen, datetime.now(UTC), _within(request), costs=_costs(request))
    if view is None:
        return site.page("empty.html", caller=_caller(request), origin=f"{request.url.scheme}://{request.url.netloc}")
    return site.page(
        "overview.html",
        caller=_caller(request),
        view=view,
        periods=PERIODS,
        class_names=CLASS_NAMES,
        costs=_costs(request),
    )


@get("/usage")
async def usage(
    request: AnyRequest,
    site: NamedDependency[Site],
    by: FromQuery[str | None] = None,
    period: FromQuery[str] = PERIODS[-1].slug,
) -> Response[str]:
    """Who cost what in `period`, `by` user, team, key, tag:NAME and more."""
    chosen, within = _period(period), _within(request)
    wanted = by or ("key" if within.user_id else "user")
    async with site.read() as connection:
        view = await gather_usage(connection, wanted, chosen, datetime.now(UTC), within)
    if view is None:
        raise NotFoundException("Usage is not shown by that. The page links to what there is.")
    return site.page("usage.html", caller=_caller(request), view=view, periods=PERIODS, costs=_costs(request))


@get("/operations")
async def operations(
    request: AnyRequest,
    site: NamedDependency[Site],
    before: FromQuery[UUID | None] = None,
    after: FromQuery[UUID | None] = None,
) -> Response[str]:
    """The newest operations, or those `before` or `after` one."""
    if before is not None and after is not None:
        raise ValidationException("The list goes on before one operation or after one, not both.")
    async with site.read() as connection:
        page = await _listed(connection, before, after, _within(request))
    if page is None:
        raise NotFoundException("The ledger does not have the operation that this list goes on from.")
    return site.page("operations.html", caller=_caller(request), page=page, costs=_costs(request))


@get("/operations/{operation_id:str}")
async def operation(request: AnyRequest, site: NamedDependency[Site], operation_id: FromPath[str]) -> Response[str]:
    """Everything about one operation."""
    try:
        wanted = UUID(operation_id)
    except ValueError:
        raise NotFoundException("That is not an operation's id. Ids look like a UUID.") from None
    async with site.read() as connection:
        explained = await explain(connection, wanted, within=_within(request))
    if explained is None:
        raise NotFoundException(
            "The ledger has no operation with this id. A new one appears within seconds of its last token."
        )
    found, costs = explained.operation, _costs(request)
    sides = {name: [getattr(each, name) for each in explained.attempts] for name in ("billed", "cost")}
    return site.page(
        "operation.html",
        caller=_caller(request),
        explained=explained,
        adjustments=[each for each in explained.adjustments if costs or each.billed_delta is not None],
        found=found,
        operation=found.record,
        unknown={name: _why_unknown(amounts) for name, amounts in sides.items()},
        timeline=timeline(found.record),
        first_token=first_token(found.record),
        class_names=CLASS_NAMES,
        part_names=PART_NAMES,
        costs=costs,
    )


def _why_unknown(amounts: Iterable[Amount]) -> str | None:
    """Of the first that is; None where all are known."""
    return next((each.note for each in amounts if each.amount is None), None)


async def _listed(
    connection: AsyncConnection, before: UUID | None, after: UUID | None, within: Within
) -> OperationPage | None:
    """A page of the list; None when the ledger does not have the operation it goes on from."""
    if before is not None:
        return await operations_before(connection, before, LATEST, within=within)
    if after is not None:
        page = await operations_after(connection, after, LATEST, within=within)
        if page is None or page.newer:
            return page
    # All that is newer is on the first page, which is a whole one.
    found = await latest_operations(connection, LATEST + 1, within=within)
    return OperationPage(rows=found[:LATEST], newer=False, older=len(found) > LATEST)


def _period(slug: str) -> Period:
    chosen = next((each for each in PERIODS if each.slug == slug), None)
    if chosen is None:
        names = ", ".join(each.slug for each in PERIODS)
        raise NotFoundException(f"There is no such period. Choose one of {names}.")
    return chosen


def _caller(request: AnyRequest) -> Caller:
    caller: Caller = request.state.caller
    return caller


def _within(request: AnyRequest) -> Within:
    """What whoever asks may see: a member their own, an administrator of one organisation that one."""
    caller = _caller(request)
    return Within(org_id=caller.org_id, user_id=caller.user_id)


def _costs(request: AnyRequest) -> bool:
    """Whether whoever asks may see what it cost the operator: a member is a customer."""
    return _caller(request).may("read")
