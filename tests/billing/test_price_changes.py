"""What an operator enters: shown first, then entered whole or not at all, and never in the configuration's way."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import prices
from billing.ids import new_id
from billing.price_changes import Change, Entry, amended, changes, corrected, enter, name_of
from billing.prices import PriceTerms

SMALL = PriceTerms(book="sale", model="small", currency="USD", input_fresh=Decimal(1), output_text=Decimal(4))
SOON = datetime.now(UTC) + timedelta(days=1)


def terms(**changes: Any) -> PriceTerms:
    return msgspec.structs.replace(SMALL, **changes)


def entry(at: datetime | None = None, **changes: Any) -> Entry:
    return Entry(terms=terms(**changes), effective_at=at)


def kinds(found: list[Change]) -> list[str]:
    return [change.kind for change in found]


async def test_a_change_is_told_before_it_is_made(conn: AsyncConnection) -> None:
    await prices.seed(conn, [SMALL])
    wanted = [entry(output_text=Decimal(5)), entry(model="new"), entry(SOON, input_fresh=Decimal(2))]
    found = await changes(conn, wanted)
    assert kinds(found) == ["changed", "new", "changed"]
    assert found[0].differences() == {"output_text": (4, 5)}
    assert (found[0].until, found[2].until) == (None, None)
    assert found[2].before is not None and found[2].before.output_text == 5, "by then the first one holds"
    assert (await prices.load(conn)).sale("new") is None, "nothing was entered"
    assert kinds(await enter(conn, wanted)) == kinds(found)
    book = await prices.load(conn)
    small = book.sale("small")
    assert small is not None and (small.output_text, small.source) == (5, "operator")
    assert kinds(await enter(conn, wanted)) == ["same"] * 3
    assert (await changes(conn, wanted[:1]))[0].until == SOON
    later = book.at(SOON).sale("small")
    assert later is not None and later.input_fresh == 2


async def test_the_configuration_leaves_an_operator_s_price_until_it_changes_itself(conn: AsyncConnection) -> None:
    async def in_force() -> Decimal | None:
        found = (await prices.load(conn)).sale("small")
        return None if found is None else found.input_fresh

    await prices.seed(conn, [SMALL])
    await enter(conn, [entry(input_fresh=Decimal(2))])
    assert await prices.seed(conn, [SMALL]) == []
    assert await in_force() == 2
    assert await prices.seed(conn, [terms(input_fresh=Decimal(3))]) != []
    assert await in_force() == 3
    unpriced = PriceTerms(book="sale", model="only-here", currency="USD")
    await enter(conn, [entry(model="only-here")])
    assert await prices.seed(conn, [unpriced]) == [], "it never had a price there, so it takes none away"
    assert (await prices.load(conn)).sale("only-here") is not None


async def test_an_ended_price(conn: AsyncConnection) -> None:
    await prices.seed(conn, [SMALL])
    nothing = Entry(terms=await _ended(conn))
    assert kinds(await enter(conn, [nothing])) == ["ended"]
    assert (await prices.load(conn)).sale("small") is None
    assert kinds(await enter(conn, [nothing])) == ["same"]


async def _ended(conn: AsyncConnection) -> PriceTerms:
    return (await amended(conn, SMALL, {}, None)).terms


async def test_what_is_not_given_stays_as_it_is(conn: AsyncConnection) -> None:
    await prices.seed(conn, [SMALL])
    changed = (await amended(conn, SMALL, {"input_fresh": Decimal(2)}, None)).terms
    assert (changed.input_fresh, changed.output_text, changed.input_cache_write) == (2, 4, None)
    first = (await amended(conn, terms(model="new"), {"input_fresh": Decimal(2)}, None)).terms
    assert (first.input_cache_write, first.output_text) == (2, None)
    together = terms(output_reasoning=Decimal(4))
    await prices.seed(conn, [together])
    changed = (await amended(conn, together, {"output_text": Decimal(5)}, None)).terms
    assert (changed.output_text, changed.output_reasoning) == (5, 5), "they cost the same, and go on doing so"
    own = terms(scope_kind="org", scope_id="x", tier="")
    assert (await amended(conn, own, {"factor": Decimal("0.5")}, None)).terms.input_fresh is None
    with pytest.raises(ValueError, match="not both"):
        await amended(conn, own, {"factor": Decimal(1), "input_fresh": Decimal(1)}, None)


async def test_a_correction_begins_when_the_wrong_one_did(conn: AsyncConnection) -> None:
    await prices.seed(conn, [SMALL])
    wrong = (await prices.load(conn)).sale("small")
    assert wrong is not None
    right = await amended(conn, await corrected(conn, wrong.id), {"input_fresh": Decimal(9)}, None)
    assert right.effective_at == wrong.effective_at
    await enter(conn, [right])
    found = (await prices.load(conn)).at(wrong.effective_at).sale("small")
    assert found is not None and (found.input_fresh, found.output_text) == (9, 4)
    with pytest.raises(ValueError, match="there is no price version"):
        await corrected(conn, new_id())


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ([entry(currency="EUR")], "sale of small is in EUR; this book is in USD"),
        ([entry(), entry(input_fresh=Decimal(2))], "sale of small is there twice for the same moment"),
        ([entry(datetime(2026, 12, 1))], "the moment needs a time zone"),
    ],
)
async def test_with_one_mistake_nothing_is_entered(conn: AsyncConnection, wanted: list[Entry], sentence: str) -> None:
    await prices.seed(conn, [terms(model="other")])
    with pytest.raises(ValueError, match=sentence):
        await enter(conn, [entry(model="fine"), *wanted])
    assert (await prices.load(conn)).sale("fine") is None


def test_names_that_a_person_uses() -> None:
    assert name_of(terms(tier="batch")) == "sale of small, batch"
    assert name_of(PriceTerms(book="cost", model="", upstream="gpu", currency="USD")) == "cost of the device on gpu"
    every = PriceTerms(book="sale", model="", tier="", scope_kind="org", scope_id="7", currency="USD")
    assert name_of(every) == "sale of every model, for org 7"
