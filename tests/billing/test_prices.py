"""The versioned price book in a real PostgreSQL."""

from decimal import Decimal

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import prices
from billing.prices import PriceTerms

SMALL = PriceTerms(book="sale", model="small", currency="USD", input_fresh=Decimal("0.05"), output_text=Decimal("0.20"))
SMALL_COST = PriceTerms(book="cost", model="small", upstream="engine", currency="USD", device_hour=Decimal("0.20"))


async def test_a_version_is_made_only_when_a_price_changes(conn: AsyncConnection) -> None:
    assert await prices.seed(conn, [SMALL, SMALL_COST]) == [SMALL, SMALL_COST]
    assert await prices.seed(conn, [SMALL, SMALL_COST]) == []
    same = msgspec.structs.replace(SMALL, input_fresh=Decimal("0.0500"))
    assert await prices.seed(conn, [same]) == []
    first = (await prices.load(conn)).sale("small")
    dearer = msgspec.structs.replace(SMALL, input_fresh=Decimal("0.06"), input_cached=Decimal(0))
    assert await prices.seed(conn, [dearer, SMALL_COST]) == [dearer]
    second = (await prices.load(conn)).sale("small")
    assert first is not None
    assert second is not None
    assert (first.input_fresh, first.input_cached) == (Decimal("0.05"), None)
    assert (second.input_fresh, second.input_cached) == (Decimal("0.06"), Decimal(0))
    assert first.id != second.id
    assert first.effective_at < second.effective_at
    assert (await conn.execute(text("SELECT count(*) FROM price_version"))).scalar_one() == 3


async def test_a_price_that_is_taken_away_is_unknown_from_then_on(conn: AsyncConnection) -> None:
    never = PriceTerms(book="sale", model="small", currency="USD")
    assert await prices.seed(conn, [never]) == []
    await prices.seed(conn, [SMALL, SMALL_COST])
    assert await prices.seed(conn, [never, SMALL_COST]) == [never]
    book = await prices.load(conn)
    assert book.sale("small") is None
    assert book.cost("small", "engine") is not None
    assert await prices.seed(conn, [SMALL]) == [SMALL]
    assert (await prices.load(conn)).sale("small") is not None


async def test_prices_to_come_are_not_in_force(conn: AsyncConnection) -> None:
    await prices.seed(conn, [SMALL])
    await conn.execute(text("UPDATE price_version SET effective_at = now() + interval '1 hour'"))
    assert (await prices.load(conn)).sale("small") is None


async def test_a_book_tells_sale_from_cost_and_upstreams_apart(conn: AsyncConnection) -> None:
    other = msgspec.structs.replace(SMALL_COST, upstream="elsewhere", device_hour=None, output_text=Decimal(1))
    await prices.seed(conn, [SMALL, SMALL_COST, other])
    book = await prices.load(conn)
    sale, cost, elsewhere = book.sale("small"), book.cost("small", "engine"), book.cost("small", "elsewhere")
    assert sale is not None
    assert cost is not None
    assert elsewhere is not None
    assert (sale.output_text, cost.output_text, elsewhere.output_text) == (Decimal("0.20"), None, Decimal(1))
    assert (cost.device_hour, elsewhere.device_hour) == (Decimal("0.20"), None)
    assert book.sale("large") is None
    assert book.cost("small", "nowhere") is None


async def test_a_batch_tier_beside_the_standard_one(conn: AsyncConnection) -> None:
    half = msgspec.structs.replace(SMALL, tier="batch", input_fresh=Decimal("0.025"))
    assert await prices.seed(conn, [SMALL, half]) == [SMALL, half]
    assert await prices.seed(conn, [SMALL, half]) == []
    book = await prices.load(conn)
    standard, batch = book.sale("small"), book.sale("small", "batch")
    assert standard is not None
    assert batch is not None
    assert (standard.input_fresh, batch.input_fresh) == (Decimal("0.05"), Decimal("0.025"))
    assert standard.id != batch.id
    none = PriceTerms(book="sale", model="small", tier="batch", currency="USD")
    assert await prices.seed(conn, [SMALL, none]) == [none]
    assert (await prices.load(conn)).sale("small", "batch") == standard, "the standard one holds"
    assert (await prices.load(conn)).sale("large", "batch") is None


@pytest.mark.parametrize("amount", ["1E-30", "123456789012345678901234567890.123456789012345678901234567890"])
async def test_prices_keep_all_their_digits(conn: AsyncConnection, amount: str) -> None:
    await prices.seed(conn, [msgspec.structs.replace(SMALL, output_text=Decimal(amount))])
    price = (await prices.load(conn)).sale("small")
    assert price is not None
    assert price.output_text == Decimal(amount)


def test_terms_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="a sale price names no upstream"):
        msgspec.structs.replace(SMALL, upstream="engine")
    with pytest.raises(ValueError, match="a cost names one"):
        msgspec.structs.replace(SMALL_COST, upstream="")
    with pytest.raises(ValueError, match="only a sale price has a batch tier"):
        msgspec.structs.replace(SMALL_COST, tier="batch")
    with pytest.raises(ValueError, match="device_hour is -1"):
        msgspec.structs.replace(SMALL_COST, device_hour=Decimal(-1))
