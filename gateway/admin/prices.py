"""`/prices`: the price book, what a change of it would do, and what earlier charges become by a corrected one."""

from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import price_changes, prices
from billing.adjustments import Rerating, rerate
from billing.price_changes import Change, Entry
from billing.prices import Book, Price, PriceScope, PriceTerms, Tier
from gateway.admin.access import needs
from gateway.admin.moments import moment, period
from gateway.admin.paging import Listing, Page, cut
from gateway.admin.scopes import charged_in
from gateway.admin.writing import Admin, Writer

RERATE_SECONDS = 300.0


class NewPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One price, as a whole: a part that is not given is unpriced. All parts left out end the price."""

    book: Book
    """`sale`: what users are billed; `cost`: what the operator pays."""
    model: str
    upstream: str = ""
    """Of a cost."""
    tier: Tier = "standard"
    scope_kind: PriceScope = ""
    """Whose override it is; empty: the list price."""
    scope_id: str = ""
    currency: str | None = None
    """null: what the gateway bills in."""
    input_fresh: Decimal | None = None
    input_cached: Decimal | None = None
    input_cache_write: Decimal | None = None
    output_text: Decimal | None = None
    output_reasoning: Decimal | None = None
    per_request: Decimal | None = None
    per_image: Decimal | None = None
    per_cached_answer: Decimal | None = None
    device_hour: Decimal | None = None
    factor: Decimal | None = None
    """Of an override: times the list price."""
    effective_at: datetime | None = None
    """null: now. In the past it is a correction: earlier charges stay until they are re-rated."""


class NewPrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prices: list[NewPrice]


class Changes(msgspec.Struct, frozen=True):
    changes: list[Change]


class Period(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    start: datetime
    end: datetime
    """Exclusive."""
    reason: str
    """It stands in every adjustment."""
    model: str | None = None
    dry_run: bool = False


@get("/prices", opt=needs("read", everywhere=True))
async def list_prices(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[Price]:
    """Every version there has been or will be, in the order in which they were entered."""
    async with admin.read() as conn:
        return cut(await prices.load_all(conn), page, _id)


@post("/prices/preview", opt=needs("manage", everywhere=True), status_code=200)
async def preview(writer: NamedDependency[Writer], data: JSONBody[NewPrices]) -> Response[Changes]:
    """What entering these prices would change; it changes nothing."""

    async def work(conn: AsyncConnection) -> Changes:
        return Changes(await price_changes.changes(conn, await _entries(conn, data)))

    return await writer.write(work)


@post("/prices", opt=needs("manage", everywhere=True), status_code=200)
async def enter(writer: NamedDependency[Writer], data: JSONBody[NewPrices]) -> Response[Changes]:
    """Enter prices, all of them or none; running gateways use each from its moment on."""

    async def work(conn: AsyncConnection) -> Changes:
        return Changes(await price_changes.enter(conn, await _entries(conn, data)))

    return await writer.write(work)


@post("/prices/rerate", opt=needs("manage", everywhere=True), status_code=200)
async def rerate_period(writer: NamedDependency[Writer], data: JSONBody[Period]) -> Response[Rerating]:
    """Bring earlier charges to what the corrected book says, by adjustments; the ledger itself is never edited."""
    start, end = period(data.start, data.end)

    async def work(conn: AsyncConnection) -> Rerating:
        return await rerate(
            conn,
            start,
            end,
            reason=data.reason,
            actor=writer.caller.actor,
            model=data.model,
            dry_run=data.dry_run,
        )

    return await writer.write(work, RERATE_SECONDS)


ROUTES = [list_prices, preview, enter, rerate_period]


def _id(price: Price) -> UUID:
    return price.id


async def _entries(conn: AsyncConnection, data: NewPrices) -> list[Entry]:
    entries = []
    for each in data.prices:
        terms: dict[str, Any] = msgspec.structs.asdict(each)
        effective_at = moment(terms.pop("effective_at"))
        terms["currency"] = each.currency or await charged_in(conn, None)
        entries.append(Entry(terms=PriceTerms(**terms), effective_at=effective_at))
    return entries
