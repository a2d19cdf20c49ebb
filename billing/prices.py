"""The price book: immutable, versioned rows. A changed price is a new version; history is never edited."""

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from typing import Literal
from uuid import UUID

import msgspec
from sqlalchemy import func, insert, select, text
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ids import new_id
from billing.records import TokenClasses, refuse_bad_money
from billing.tables import price_version

Book = Literal["sale", "cost"]
Tier = Literal["standard", "batch"]
"""`batch`: what the lines of a batch are billed, for a model that has such a price."""

_LOCK = 0x6661727468_03  # "farth", 3: one seeder at a time


class PriceTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What something costs. `sale`: what the user is billed; `cost`: what the operator pays an upstream.

    The five token prices are per million tokens, `device_hour` is the price of one device for an hour; None means
    unpriced, 0 means free. Raises ValueError on a negative or non-finite price.
    """

    book: Book
    model: str
    upstream: str = ""
    """Empty on a sale price: a user pays the same wherever the call ran."""
    tier: Tier = "standard"
    currency: str
    input_fresh: Decimal | None = None
    input_cached: Decimal | None = None
    input_cache_write: Decimal | None = None
    output_text: Decimal | None = None
    output_reasoning: Decimal | None = None
    device_hour: Decimal | None = None

    def __post_init__(self) -> None:
        refuse_bad_money(
            input_fresh=self.input_fresh,
            input_cached=self.input_cached,
            input_cache_write=self.input_cache_write,
            output_text=self.output_text,
            output_reasoning=self.output_reasoning,
            device_hour=self.device_hour,
        )
        if (self.book == "sale") != (self.upstream == ""):
            raise ValueError("a sale price names no upstream, a cost names one")
        if self.book == "cost" and self.tier != "standard":
            raise ValueError("only a sale price has a batch tier: what an upstream costs is no different for batches")

    @property
    def unpriced(self) -> bool:
        """Whether no price is given at all."""
        token_classes = (getattr(self, name) for name in TokenClasses.__struct_fields__)
        return self.device_hour is None and all(price is None for price in token_classes)


class Price(PriceTerms, frozen=True, kw_only=True):
    """One row of `price_version`."""

    id: UUID
    effective_at: datetime


class PriceBook:
    """The prices in force when it was loaded."""

    def __init__(self, prices: Iterable[Price]) -> None:
        self._prices = {(p.book, p.model, p.upstream, p.tier): p for p in prices if not p.unpriced}

    def sale(self, model: str, tier: Tier = "standard") -> Price | None:
        """What a user is billed for `model`; None when it is unpriced. Without a batch price the standard one holds."""
        found = self._prices.get(("sale", model, "", tier))
        return found if found is not None or tier == "standard" else self.sale(model)

    def cost(self, model: str, upstream: str) -> Price | None:
        """What `model` costs on `upstream`; None when nobody said."""
        return self._prices.get(("cost", model, upstream, "standard"))

    def current(self, terms: PriceTerms) -> Price | None:
        """The price in force that a change of `terms` would replace."""
        return self._prices.get((terms.book, terms.model, terms.upstream, terms.tier))


async def load(conn: AsyncConnection) -> PriceBook:
    """The latest version of each price that is in force now, by the database's clock."""
    columns = price_version.c
    which = (columns.book, columns.model, columns.upstream, columns.tier)
    rows = await conn.execute(
        select(price_version)
        .ext(distinct_on(*which))
        .where(columns.effective_at <= func.clock_timestamp())
        .order_by(*which, columns.effective_at.desc())
    )
    return PriceBook(Price(**row) for row in rows.mappings())


async def billing_currency(conn: AsyncConnection) -> str | None:
    """Currency of the newest sale price, which is what gateways bill in; None before there is any price."""
    columns = price_version.c
    newest = select(columns.currency).where(columns.book == "sale").order_by(columns.effective_at.desc()).limit(1)
    currency: str | None = (await conn.execute(newest)).scalar_one_or_none()
    return currency


async def seed(conn: AsyncConnection, wanted: Iterable[PriceTerms]) -> list[PriceTerms]:
    """Make `wanted` the prices in force, from now on; return those that were new or had changed.

    Idempotent: a price equal to the one in force makes no new version. Terms without any price end the one in force.
    Prices not in `wanted` stay as they are.
    """
    await conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    book = await load(conn)
    changed = []
    for terms in wanted:
        current = book.current(terms)
        if terms.unpriced if current is None else terms == _terms_of(current):
            continue
        # clock_timestamp, not now(): a second change inside one transaction is a later version, not a duplicate
        row = msgspec.structs.asdict(terms) | {"id": new_id(), "effective_at": func.clock_timestamp()}
        await conn.execute(insert(price_version).values(row))
        changed.append(terms)
    return changed


def _terms_of(price: Price) -> PriceTerms:
    return PriceTerms(**{name: getattr(price, name) for name in PriceTerms.__struct_fields__})
