"""Monthly invoices of orgs and teams: issued once, numbered without gaps, never changed; voided and issued anew.

A line has its own rounding, half-even to the currency's smallest coin, and the total is the sum of the rounded lines.
Taxes are the operator's affair. What lands in the ledger after its month was invoiced, and what a corrected price
changes, comes on the next invoice, in lines that name the month.
"""

import re
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import Row, Select, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.charge import add_up
from billing.filters import Filters
from billing.gaps import gap
from billing.ids import new_id, smallest_id
from billing.invoice_lines import InvoiceLine, Key, Open, lines_of, open_charges
from billing.measures import NOTHING_DISPATCHED
from billing.tables import adjustment, invoice, invoice_line, operation, org, team
from billing.windows import window_bounds, zone

LOOK_BACK = timedelta(days=100)
"""Months that ended longer ago than this before an invoice's month are not looked at for what came late."""

LONGEST_ADDRESS, MOST_LINES = 1000, 20
"""Of who issues an invoice and who gets it: they have to fit on its first page."""

_ID_SLACK = timedelta(hours=1)  # an id may be made a little before or after `started_at` is read


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """`label`: the printed number. `total`: sum of the rounded lines, `exact_total`: of the lines before rounding."""

    id: UUID
    org_id: UUID
    team_id: UUID | None
    number: int
    label: str
    month: str
    time_zone: str
    starts_at: datetime
    ends_at: datetime
    currency: str
    customer: str
    issuer: str
    bill_to: str
    exact_total: Decimal
    total: Decimal
    unknown: int
    """Operations of the month without a known charge: they are on no line."""
    issued_at: datetime
    voided_at: datetime | None = None
    void_reason: str | None = None
    lines: tuple[InvoiceLine, ...] = ()
    """Empty in a list of invoices."""


async def create_invoice(
    conn: AsyncConnection,
    org_id: UUID,
    month: str,
    *,
    team_id: UUID | None = None,
    currency: str | None = None,
    issuer: str = "",
    bill_to: str = "",
) -> Invoice:
    """Issue the invoice of a month that is over, of an org or of one of its teams.

    An org's invoice leaves out what its teams were invoiced. Raises ValueError where the month is not over, is invoiced
    already, has nothing to ask for or several currencies, or is no longer whole in the ledger.
    """
    for words in (issuer, bill_to):
        if len(words) > LONGEST_ADDRESS or len(words.splitlines()) > MOST_LINES:
            raise ValueError(f"an address has at most {MOST_LINES} lines and {LONGEST_ADDRESS} characters")
    found = (await conn.execute(select(org).where(org.c.id == org_id).with_for_update())).one_or_none()
    if found is None:
        raise ValueError(f"there is no organisation {org_id}")
    customer = found.name if team_id is None else f"{found.name}, {await _team_name(conn, org_id, team_id)}"
    start, end = _bounds(month, found.billing_time_zone)
    await _refuse_unfinished(conn, month, end, found.billing_time_zone)
    if await gap(conn, start, end, Filters(org_id=org_id)):
        raise ValueError(f"the ledger no longer has all of {month}: retention has dropped days of it")
    currency = currency or await _currency(conn, org_id, team_id, start, end, month)
    earlier = await _valid(conn, org_id, currency)
    _refuse_twice(earlier, month, team_id)
    filters = Filters(org_id=org_id, team_id=team_id, currency=currency)
    charges = [(month, *each) for each in (await open_charges(conn, filters, month, start, end)).items()]
    charges += await _late(conn, filters, earlier, start)
    if not charges:
        raise ValueError(f"there is nothing to invoice to {customer} for {month} in {currency}")
    lines = lines_of(charges, month, currency)
    number = 1 + (
        (await conn.execute(select(func.max(invoice.c.number)).where(invoice.c.org_id == org_id))).scalar() or 0
    )
    issued = Invoice(
        id=new_id(),
        org_id=org_id,
        team_id=team_id,
        number=number,
        label=f"{org_id.hex[-8:].upper()}-{number:04}",
        month=month,
        time_zone=found.billing_time_zone,
        starts_at=start,
        ends_at=end,
        currency=currency,
        customer=customer,
        issuer=issuer,
        bill_to=bill_to,
        exact_total=add_up(line.exact_amount for line in lines),
        total=add_up(line.amount for line in lines),
        unknown=await _unknown(conn, filters, start, end),
        issued_at=(await conn.execute(select(func.now()))).scalar_one(),
        lines=tuple(lines),
    )
    await conn.execute(insert(invoice).values({c.name: getattr(issued, c.name) for c in invoice.columns}))
    rows = [{"invoice_id": issued.id} | msgspec.structs.asdict(line) for line in lines]
    await conn.execute(insert(invoice_line), rows)
    return issued


async def list_invoices(conn: AsyncConnection, org_id: UUID | None = None) -> list[Invoice]:
    """All, or an org's, newest first, without their lines."""
    query = select(invoice).order_by(invoice.c.issued_at.desc(), invoice.c.number.desc())
    if org_id is not None:
        query = query.where(invoice.c.org_id == org_id)
    return [_invoice(row) for row in await conn.execute(query)]


async def find_invoice(conn: AsyncConnection, which: UUID | str) -> Invoice | None:
    """By id or label, with its lines; None when there is none."""
    try:
        where = invoice.c.id == (which if isinstance(which, UUID) else UUID(which))
    except ValueError:
        where = invoice.c.label == str(which).strip().upper()
    row = (await conn.execute(select(invoice).where(where))).one_or_none()
    if row is None:
        return None
    wanted = [invoice_line.c[name] for name in InvoiceLine.__struct_fields__]
    query = select(*wanted).where(invoice_line.c.invoice_id == row.id).order_by(invoice_line.c.number)
    lines = [InvoiceLine(**each) for each in (await conn.execute(query)).mappings()]
    return _invoice(row, lines=tuple(lines))


async def void_invoice(conn: AsyncConnection, invoice_id: UUID, reason: str) -> Invoice:
    """Take an invoice back; its number stays taken, and its month can be invoiced anew.

    Raises ValueError without a reason, and where there is no such invoice or it is void already.
    """
    if not reason.strip():
        raise ValueError("say why the invoice is void: the reason is kept with it")
    change = (
        update(invoice)
        .where(invoice.c.id == invoice_id, invoice.c.voided_at.is_(None))
        .values(voided_at=func.now(), void_reason=reason.strip())
    )
    changed = (await conn.execute(change)).rowcount
    found = await find_invoice(conn, invoice_id)
    if found is None:
        raise ValueError(f"there is no invoice {invoice_id}")
    if not changed:
        raise ValueError(f"invoice {found.label} is void already: {found.void_reason}")
    return found


async def set_billing_time_zone(conn: AsyncConnection, org_id: UUID, time_zone: str) -> None:
    """On whose clock the org's months begin.

    Raises ValueError on an unknown zone or org, and once there are valid invoices: their months would overlap.
    """
    zone(time_zone)
    known = (await conn.execute(select(org.c.id).where(org.c.id == org_id).with_for_update())).one_or_none()
    if known is None:
        raise ValueError(f"there is no organisation {org_id}")
    others = select(invoice.c.label).where(
        invoice.c.org_id == org_id, invoice.c.voided_at.is_(None), invoice.c.time_zone != time_zone
    )
    if (label := (await conn.execute(others.limit(1))).scalar_one_or_none()) is not None:
        raise ValueError(f"invoice {label} has its month on another clock; void the org's invoices first")
    await conn.execute(update(org).where(org.c.id == org_id).values(billing_time_zone=time_zone))


def _bounds(month: str, time_zone: str) -> tuple[datetime, datetime]:
    if re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month) is None or month < "1970-02":
        raise ValueError(f"{month!r} is not a month; write it like 2026-11")
    tz = zone(time_zone)
    year, number = map(int, month.split("-"))
    start, end = window_bounds(datetime(year, number, 15, tzinfo=tz), "month", tz)
    assert end is not None, "a month ends"
    return start, end


async def _refuse_unfinished(conn: AsyncConnection, month: str, end: datetime, time_zone: str) -> None:
    now: datetime = (await conn.execute(select(func.now()))).scalar_one()
    if end > now:
        raise ValueError(f"{month} is not over in {time_zone}: it can be invoiced from {end.isoformat()} on")


async def _team_name(conn: AsyncConnection, org_id: UUID, team_id: UUID) -> str:
    query = select(team.c.name).where(team.c.id == team_id, team.c.org_id == org_id)
    name = (await conn.execute(query)).scalar_one_or_none()
    if name is None:
        raise ValueError(f"there is no team {team_id} in the organisation {org_id}")
    return str(name)


def _of_month(query: Select[Any], org_id: UUID, team_id: UUID | None, start: datetime, end: datetime) -> Select[Any]:
    columns = operation.c
    query = query.where(
        columns.org_id == org_id,
        columns.started_at >= start,
        columns.started_at < end,
        columns.id >= smallest_id(start - _ID_SLACK),
        columns.id < smallest_id(end + _ID_SLACK),
    )
    return query if team_id is None else query.where(columns.team_id == team_id)


async def _currency(
    conn: AsyncConnection, org_id: UUID, team_id: UUID | None, start: datetime, end: datetime, month: str
) -> str:
    query = _of_month(select(operation.c.currency).distinct(), org_id, team_id, start, end)
    found = sorted((await conn.execute(query)).scalars())
    if not found:
        raise ValueError(f"there is nothing to invoice for {month}")
    if len(found) > 1:
        raise ValueError(f"{month} was charged in {', '.join(found)}: name one, for each has an invoice of its own")
    return str(found[0])


async def _valid(conn: AsyncConnection, org_id: UUID, currency: str) -> list[Invoice]:
    query = select(invoice).where(
        invoice.c.org_id == org_id, invoice.c.currency == currency, invoice.c.voided_at.is_(None)
    )
    return [_invoice(row) for row in await conn.execute(query)]


def _refuse_twice(earlier: list[Invoice], month: str, team_id: UUID | None) -> None:
    for each in earlier:
        if each.month == month and each.team_id in (None, team_id):
            raise ValueError(
                f"{month} is on invoice {each.label} already; void that one first "
                "(what landed since comes on the next month's)"
            )


async def _late(
    conn: AsyncConnection, filters: Filters, earlier: list[Invoice], start: datetime
) -> list[tuple[str, Key, Open]]:
    """What landed since the invoices before. Of a month that its org was invoiced for, only the org is asked for it."""
    assert filters.org_id is not None
    of_org = {each.month for each in earlier if each.team_id is None}
    found = []
    for each in earlier:
        if (
            each.team_id != filters.team_id
            or (filters.team_id is not None and each.month in of_org)
            or not start - LOOK_BACK <= each.ends_at <= start
            or await gap(conn, each.starts_at, each.ends_at, Filters(org_id=filters.org_id))
        ):
            continue
        charges = await open_charges(conn, filters, each.month, each.starts_at, each.ends_at)
        found += [(each.month, key, line) for key, line in charges.items()]
    return found


async def _unknown(conn: AsyncConnection, filters: Filters, start: datetime, end: datetime) -> int:
    adjusted = select(adjustment.c.id).where(
        adjustment.c.operation_id == operation.c.id, adjustment.c.billed_delta.is_not(None)
    )
    assert filters.org_id is not None
    query = _of_month(select(func.count()), filters.org_id, filters.team_id, start, end).where(
        operation.c.billed.is_(None),
        operation.c.status.not_in(NOTHING_DISPATCHED),
        operation.c.currency == filters.currency,
        ~adjusted.exists(),
    )
    return int((await conn.execute(query)).scalar_one())


def _invoice(row: Row[Any], **more: Any) -> Invoice:
    values: dict[str, Any] = dict(row._mapping)
    return Invoice(**(values | more))
