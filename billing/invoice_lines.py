"""What belongs on an invoice: a month's charges by model, part and price, less what earlier invoices have of them."""

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.charge import EXACT
from billing.charged import CACHED_ANSWER, PARTS, charged
from billing.currencies import rounded
from billing.filters import Filters
from billing.tables import invoice, invoice_line

WORDS = {
    "input_fresh": "input tokens",
    "input_cached": "cached input tokens",
    "input_cache_write": "input tokens written to the cache",
    "output_text": "output tokens",
    "output_reasoning": "reasoning tokens",
    "request": "requests",
    "image": "images",
    "response_cache": "answers from the response cache",
    "adjustment": "adjustment of earlier charges to corrected prices",
    "other": "other charges",
}
"""Parts as an invoice calls them, in its order."""


class Key(NamedTuple):
    """What one line is about."""

    model: str
    tier: str
    part: str
    price_version_id: UUID | None
    override_id: UUID | None


class Open(NamedTuple):
    """Charged, and on no invoice yet."""

    quantity: Decimal
    amount: Decimal
    unit: str
    unit_price: Decimal | None
    per: int


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """`quantity` * `unit_price` / `per` = `exact_amount`, to the last digit, where there is a unit price."""

    number: int
    month: str
    """Of the usage."""
    model: str
    tier: str
    part: str
    price_version_id: UUID | None
    override_id: UUID | None
    description: str
    quantity: Decimal
    unit: str
    unit_price: Decimal | None
    per: int
    exact_amount: Decimal
    amount: Decimal
    """Rounded half-even, once."""


async def open_charges(
    conn: AsyncConnection, filters: Filters, month: str, start: datetime, end: datetime
) -> dict[Key, Open]:
    """What the ledger has of a month and no valid invoice has, for one org (or team of it) in one currency.

    What came after the month was invoiced is a difference; what has not changed is left out.
    """
    found: dict[Key, Open] = {}
    async for each in charged(conn, "sale", start, end, filters):
        key = Key(each.model, each.tier, each.part, each.price_version_id, each.override_id)
        before = found.get(key, Open(Decimal(0), Decimal(0), each.unit, each.unit_price, each.per))
        found[key] = before._replace(
            quantity=EXACT.add(before.quantity, each.quantity), amount=EXACT.add(before.amount, each.amount)
        )
    for key, line in (await _invoiced(conn, filters, month)).items():
        now = found.get(key, line._replace(quantity=Decimal(0), amount=Decimal(0)))
        found[key] = now._replace(
            quantity=EXACT.subtract(now.quantity, line.quantity), amount=EXACT.subtract(now.amount, line.amount)
        )
    return {key: line for key, line in found.items() if line.quantity or line.amount}


async def _invoiced(conn: AsyncConnection, filters: Filters, month: str) -> dict[Key, Open]:
    """On valid invoices. Those of an org count its teams' in, so that nothing is asked for twice."""
    line = invoice_line.c
    query = (
        select(
            *(line[name] for name in Key._fields),
            func.sum(line.quantity).label("quantity"),
            func.sum(line.exact_amount).label("amount"),
            func.min(line.unit).label("unit"),
            func.min(line.unit_price).label("unit_price"),
            func.min(line.per).label("per"),
        )
        .join(invoice, invoice.c.id == line.invoice_id)
        .where(
            invoice.c.org_id == filters.org_id,
            invoice.c.currency == filters.currency,
            invoice.c.voided_at.is_(None),
            line.month == month,
        )
        .group_by(*(line[name] for name in Key._fields))
    )
    if filters.team_id is not None:
        query = query.where(invoice.c.team_id == filters.team_id)
    rows = (await conn.execute(query)).mappings()
    return {Key(*(row[name] for name in Key._fields)): Open(*(row[name] for name in Open._fields)) for row in rows}


def lines_of(charges: Iterable[tuple[str, Key, Open]], month: str, currency: str) -> list[InvoiceLine]:
    """Numbered lines of an invoice for `month`: what is late after its own, models by name, parts in WORDS' order.

    Raises ValueError where nobody can say what `currency` is rounded to.
    """
    order = list(WORDS)
    ordered = sorted(
        charges, key=lambda each: (each[0] != month, each[0], each[1].model, each[1].tier, order.index(each[1].part))
    )
    return [
        InvoiceLine(
            number=number,
            month=of,
            description=_description(key, of, month),
            quantity=line.quantity,
            unit=line.unit,
            unit_price=line.unit_price,
            per=line.per,
            exact_amount=line.amount,
            amount=rounded(line.amount, currency),
            **key._asdict(),
        )
        for number, (of, key, line) in enumerate(ordered, 1)
    ]


def _description(key: Key, of: str, month: str) -> str:
    words = [": ".join(filter(None, (key.model, WORDS[key.part])))]
    if key.tier != "standard":
        words.append(f"{key.tier} tier")
    if key.override_id is not None:
        words.append("agreed price")
    if of != month:
        words.append(f"of {of}, recorded late")
    return words[0] + (f" ({', '.join(words[1:])})" if words[1:] else "")


assert {part.name for part in (*PARTS, CACHED_ANSWER)} <= set(WORDS), "every part has words"
