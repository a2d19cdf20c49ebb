"""An upstream's bill beside the ledger: exports as the vendors write them, and what differs."""

import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from random_ledger import store
from samples import an_attempt, an_operation
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.bills import BillLine, read_bill, slack
from billing.ids import smallest_id
from billing.reconciliation import Reconciliation, reconcile
from billing.records import TokenClasses

DAY = datetime(2026, 9, 14, 23, 59, tzinfo=UTC)
ANTHROPIC_USAGE = (
    "usage_date_utc,model_version,api_key,workspace,usage_type,context_window,usage_input_tokens_no_cache,"
    "usage_input_tokens_cache_write_5m,usage_input_tokens_cache_write_1h,usage_input_tokens_cache_read,"
    "usage_output_tokens,web_search_count,inference_geo,speed\n"
    "2026-09-14,claude-x,app,Default,standard,≤ 200k,100,20,10,40,50,0,global,\n"
)
ANTHROPIC_COST = (
    "usage_date_utc,model,workspace,api_key,usage_type,context_window,token_type,cost_usd,list_price_usd,cost_type\n"
    "2026-09-14,Claude X,Default,app,message,≤ 200k,input_no_cache,0.75,0.75,token\n"
    "2026-09-14,Claude X,Default,app,message,≤ 200k,output,0.26,0.26,token\n"
)
OPENAI_USAGE = (
    "start_time,end_time,start_time_iso,end_time_iso,input_tokens,output_tokens,num_model_requests,model,"
    "input_cached_tokens\n"
    f"{int(DAY.timestamp())},0,x,x,170,50,1,claude-x,40\n"
)
OPENAI_COST = (
    "start_time,end_time,start_time_iso,end_time_iso,amount_value,amount_currency,line_item,project_id\n"
    f'{int(DAY.timestamp())},0,x,x,0.7500001,usd,"claude-x, input",p\n'
    f'{int(DAY.timestamp())},0,x,x,0.2599999,usd,"claude-x, output",p\n'
)


async def ledger(conn: AsyncConnection, cost: str | None = "1.01", **fields: Any) -> None:
    tokens = TokenClasses(input_fresh=100, input_cache_write=30, input_cached=40, output_text=35, output_reasoning=15)
    attempt = an_attempt(
        upstream="hosted", model="claude-x", started_at=DAY, tokens=tokens, cost=None if cost is None else Decimal(cost)
    )
    other = an_attempt(2, upstream="elsewhere", model="claude-x", started_at=DAY, tokens=tokens, cost=Decimal(9))
    identifier = smallest_id(DAY)
    await store(conn, [an_operation(id=identifier, started_at=DAY, attempts=[attempt, other], **fields)])


async def compared(conn: AsyncConnection, bill: str, **options: Any) -> Reconciliation:
    return await reconcile(conn, "hosted", read_bill(bill), **options)


async def test_the_vendors_exports_agree_with_an_equal_ledger(conn: AsyncConnection) -> None:
    await ledger(conn)
    for bill, fields in (
        (ANTHROPIC_USAGE, ["input_fresh", "input_cached", "input_cache_write", "completion_tokens"]),
        (ANTHROPIC_COST, ["cost"]),
        (OPENAI_USAGE, ["prompt_tokens", "input_cached", "completion_tokens"]),
        (OPENAI_COST, ["cost"]),
    ):
        found = await compared(conn, bill, names={"Claude X": "claude-x"}, tolerance=Decimal(0))
        assert found.differences == () and found.compared == 1
        assert [total.what for total in found.totals] == fields
        assert all(total.difference == 0 and total.bill > 0 for total in found.totals)


async def test_what_differs_is_listed_with_the_day_and_the_model(conn: AsyncConnection) -> None:
    await ledger(conn)
    found = await compared(conn, ANTHROPIC_USAGE.replace(",50,0,", ",57,0,"))
    [difference] = found.differences
    assert (difference.day, difference.model, difference.what) == (date(2026, 9, 14), "claude-x", "completion_tokens")
    assert (difference.bill, difference.ledger, difference.difference) == (57, 50, 7)
    assert (
        await compared(conn, ANTHROPIC_USAGE.replace(",50,0,", ",57,0,"), tolerance=Decimal("0.13"))
    ).differences == ()


async def test_a_day_or_model_that_one_side_lacks_differs(conn: AsyncConnection) -> None:
    await ledger(conn)
    bill = ANTHROPIC_USAGE + "2026-09-15,claude-z,app,Default,standard,≤ 200k,1,0,0,0,2,0,global,\n"
    found = await compared(conn, bill, month="2026-09")
    assert {(each.day, each.model, each.difference) for each in found.differences} == {
        (date(2026, 9, 15), "claude-z", 1),
        (date(2026, 9, 15), "claude-z", 2),
    }
    assert (found.first_day, found.last_day) == (date(2026, 9, 1), date(2026, 9, 30))
    missing = await compared(conn, bill.replace("2026-09-14", "2026-09-13"))
    assert {each.day for each in missing.differences} == {date(2026, 9, day) for day in (13, 14, 15)}


async def test_rounding_on_the_bill_is_no_difference_but_more_is(conn: AsyncConnection) -> None:
    await ledger(conn, cost="1.0149")
    names = {"Claude X": "claude-x"}
    assert (await compared(conn, ANTHROPIC_COST, names=names, tolerance=Decimal(0))).differences == ()
    assert (await compared(conn, OPENAI_COST, tolerance=Decimal(0))).differences != ()
    assert slack(iter([Decimal("0.75"), Decimal("1.5"), Decimal(3)])) == Decimal("0.555")


async def test_unknown_costs_are_counted_and_not_zero_in_silence(conn: AsyncConnection) -> None:
    await ledger(conn, cost=None)
    found = await compared(conn, OPENAI_COST)
    assert found.unknown == 1 and found.differences[0].ledger == 0
    assert (await compared(conn, OPENAI_USAGE)).unknown == 0


async def test_another_currency_is_not_compared(conn: AsyncConnection) -> None:
    await ledger(conn, currency="EUR")
    found = await compared(conn, OPENAI_COST)
    assert found.currency == "USD" and found.unknown == 1 and found.totals[0].ledger == 0


async def test_any_csv_is_read_by_its_columns(conn: AsyncConnection) -> None:
    await ledger(conn)
    bill = 'Tag;Modell;Betrag\n2026-09-14T23:59:00+00:00;claude-x;"$1.01"\n'
    lines = read_bill(bill, {"day": "Tag", "model": "Modell", "cost": "Betrag"})
    assert lines == [BillLine(day=date(2026, 9, 14), model="claude-x", counts={}, cost=Decimal("1.01"), currency=None)]
    assert (await reconcile(conn, "hosted", lines)).differences == ()


@pytest.mark.parametrize(
    ("bill", "columns", "problem"),
    [
        ("a,b\n1,2\n", None, "are of no known export; say which are which"),
        ("", None, "are of no known export"),
        (ANTHROPIC_USAGE.partition("\n")[0], None, "the bill has no rows"),
        (ANTHROPIC_USAGE.replace("2026-09-14", "14.9."), None, "line 2 of the bill: the day is '14.9.'"),
        (ANTHROPIC_USAGE.replace(",50,0,", ",many,0,"), None, "line 2 of the bill: usage_output_tokens is 'many'"),
        (ANTHROPIC_USAGE.replace(",50,0,", ",5.5,0,"), None, "completion_tokens is 5.5, not a whole number"),
        (ANTHROPIC_USAGE.replace(",50,0,", ",NaN,0,"), None, "is 'NaN', not a number"),
        ("d,m,c\n2026-09-14,x,1\n", {"day": "d", "model": "m"}, "say which columns to compare"),
        ("d,m,c\n2026-09-14,x,1\n", {"day": "d", "cost": "c"}, "say which columns are the day and the model"),
        (
            "d,m,c\n2026-09-14,x,1\n",
            {"day": "d", "model": "m", "cost": "k"},
            "the bill has no column 'k'; it has d, m, c",
        ),
        ("d,m,c\n2026-09-14,x,1\n", {"tag": "d"}, "'tag' is no field of a bill"),
    ],
)
def test_a_bill_that_cannot_be_read_says_where(bill: str, columns: dict[str, str] | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_bill(bill, columns)


async def test_what_cannot_be_compared_says_why(conn: AsyncConnection) -> None:
    await ledger(conn)
    with pytest.raises(ValueError, match="the ledger knows no upstream 'nobody'; it has elsewhere, hosted"):
        await reconcile(conn, "nobody", read_bill(OPENAI_COST))
    with pytest.raises(ValueError, match="the bill has no day of 2026-08"):
        await compared(conn, OPENAI_COST, month="2026-08")
    with pytest.raises(ValueError, match="the bill is in EUR, USD"):
        await compared(conn, OPENAI_COST.replace("usd", "eur", 1))
    with pytest.raises(ValueError, match="the tolerance is a share"):
        await compared(conn, OPENAI_COST, tolerance=Decimal(5))


async def test_a_big_bill_adds_up(conn: AsyncConnection) -> None:
    rng = random.Random(3)
    amounts = [Decimal(rng.randrange(10**6)).scaleb(-6) for _ in range(500)]
    await ledger(conn, cost=str(sum(amounts)))
    rows = "".join(f"2026-09-14,claude-x,{amount}\n" for amount in amounts)
    lines = read_bill("d,m,c\n" + rows, {"day": "d", "model": "m", "cost": "c"})
    found = await reconcile(conn, "hosted", lines, tolerance=Decimal(0))
    assert found.differences == () and found.totals[0].bill == sum(amounts)
