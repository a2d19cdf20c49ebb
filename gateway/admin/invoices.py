"""`/invoices`: what organisations are asked to pay for a month."""

import asyncio
from uuid import UUID

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery, JSONBody
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import invoices
from billing.invoice_csv import invoice_csv
from billing.invoice_pdf import invoice_pdf
from billing.invoices import Invoice
from billing.people import MissingError
from billing.roles import Caller
from gateway.admin.access import needs, refuse_other_org
from gateway.admin.paging import Listing, Page, cut
from gateway.admin.writing import Admin, Writer

ISSUE_SECONDS = 120.0


class NewInvoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    org_id: UUID
    month: str
    """Like 2026-11."""
    team_id: UUID | None = None
    """One team's; null: what the organisation's teams were not invoiced."""
    currency: str | None = None
    issuer: str = ""
    bill_to: str = ""


class Void(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: str


@get("/invoices", opt=needs("read"))
async def list_invoices(
    admin: NamedDependency[Admin], page: NamedDependency[Page], org_id: FromQuery[UUID | None] = None
) -> Listing[Invoice]:
    """Invoices without their lines, oldest first; of one organisation where given."""
    wanted = admin.org(org_id)
    async with admin.read() as conn:
        return cut(await invoices.list_invoices(conn, wanted), page, lambda invoice: invoice.id)


@post("/invoices", opt=needs("manage", everywhere=True))
async def create_invoice(writer: NamedDependency[Writer], data: JSONBody[NewInvoice]) -> Response[Invoice]:
    """Issue the invoice of a month that is over."""

    async def work(conn: AsyncConnection) -> Invoice:
        return await invoices.create_invoice(
            conn,
            data.org_id,
            data.month,
            team_id=data.team_id,
            currency=data.currency,
            issuer=data.issuer,
            bill_to=data.bill_to,
        )

    return await writer.write(work, ISSUE_SECONDS)


@get("/invoices/{invoice_id:uuid}", opt=needs("read"))
async def get_invoice(admin: NamedDependency[Admin], invoice_id: FromPath[UUID]) -> Invoice:
    """An invoice with its lines."""
    async with admin.read() as conn:
        return await _find(admin.caller, conn, invoice_id)


@get("/invoices/{invoice_id:uuid}/pdf", opt=needs("read"), media_type="application/pdf")
async def get_pdf(admin: NamedDependency[Admin], invoice_id: FromPath[UUID]) -> Response[bytes]:
    async with admin.read() as conn:
        found = await _find(admin.caller, conn, invoice_id)
    return _file(await asyncio.to_thread(invoice_pdf, found), f"{found.label}.pdf")


@get("/invoices/{invoice_id:uuid}/csv", opt=needs("read"), media_type="text/csv")
async def get_csv(admin: NamedDependency[Admin], invoice_id: FromPath[UUID]) -> Response[bytes]:
    async with admin.read() as conn:
        found = await _find(admin.caller, conn, invoice_id)
    return _file(invoice_csv(found), f"{found.label}.csv")


@post("/invoices/{invoice_id:uuid}/void", opt=needs("manage", everywhere=True), status_code=200)
async def void_invoice(
    writer: NamedDependency[Writer], invoice_id: FromPath[UUID], data: JSONBody[Void]
) -> Response[Invoice]:
    """Take an invoice back; its number stays taken, and its month can be invoiced anew."""

    async def work(conn: AsyncConnection) -> Invoice:
        await _find(writer.caller, conn, invoice_id)
        return await invoices.void_invoice(conn, invoice_id, data.reason)

    return await writer.write(work)


ROUTES = [list_invoices, create_invoice, get_invoice, get_pdf, get_csv, void_invoice]


async def _find(caller: Caller, conn: AsyncConnection, invoice_id: UUID) -> Invoice:
    found = await invoices.find_invoice(conn, invoice_id)
    if found is None:
        raise MissingError(f"there is no invoice {invoice_id}")
    refuse_other_org(caller, found.org_id)
    return found


def _file(content: bytes, name: str) -> Response[bytes]:
    return Response(content, headers={"content-disposition": f'attachment; filename="{name}"'})
