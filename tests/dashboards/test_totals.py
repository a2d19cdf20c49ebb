"""The dashboard's totals are those of `farthing usage`, and what an operation comes to is what its explanation says."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import httpx
import msgspec
import pytest
from sample_ledger import HOSTED, PRICES, SMALL, fill
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner
from visiting import KEY_HASH, mount, sign_in, visitor

from billing import adjustments
from billing.administrators import create_administrator
from billing.explanation import explain
from billing.operations import latest_operations
from billing.price_changes import Entry, enter
from billing.prices import PriceTerms
from billing.records import TOKEN_CLASSES
from billing.rollups import refresh
from dashboards.web import COOKIE, Sessions
from gateway.cli import app

AMOUNTS = ("billed", "cost", "margin")
PERIODS = {"today": "1d", "7d": "7d", "30d": "30d"}
REASON = "a typing error in the price"
Row = Mapping[str, Any]


@pytest.fixture
async def adjusted(engine: AsyncEngine) -> AsyncEngine:
    """A month in which the small model had a wrong price and the hosted one no known cost; both were mended later."""
    now = datetime.now(UTC)
    long_ago = now - timedelta(days=60)
    right = msgspec.structs.replace(PRICES[0], input_fresh=Decimal("0.0467"), output_text=Decimal("0.2213"))
    cost = PriceTerms(
        book="cost", model=HOSTED, upstream="hosted", currency="USD",
        input_fresh=Decimal("0.6"), input_cached=Decimal("0.06"), output_text=Decimal(2),
    )  # fmt: skip
    async with engine.begin() as connection:
        await fill(connection, now, operations=300)
    await refresh(engine)
    async with engine.begin() as connection:
        await enter(connection, [Entry(terms=terms, effective_at=long_ago) for terms in (right, cost)])
        made = await adjustments.rerate(connection, long_ago, now, reason=REASON, actor="shell:ada")
        assert made.adjusted > 100 and made.billed_delta["USD"] > 0 and made.cost_delta["USD"] > 0
    return engine


@pytest.fixture
async def client(adjusted: AsyncEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with visitor(mount(adjusted)) as client:
        await sign_in(client)
        yield client


@pytest.fixture
def usage(database_url: str) -> Callable[..., Any]:
    """Rows of `farthing usage`."""
    environment = {"FARTHING_DATABASE_URL": database_url.replace("+asyncpg", "")}

    async def run(*arguments: str) -> Any:
        answer = await asyncio.to_thread(CliRunner().invoke, app, ["usage", *arguments, "--json"], env=environment)
        assert answer.exit_code == 0, answer.output
        return json.loads(answer.stdout)

    return run


def amounts(fragment: str) -> list[str]:
    return re.findall(r'<data value="([^"]*)"', fragment)


def between(page: str, start: str, end: str) -> str:
    return page.partition(start)[2].partition(end)[0]


def table(page: str, caption: str) -> dict[str, list[str]]:
    """The rows of the table whose caption has this id: name -> cells. Money with every digit, `–` where unknown."""
    found = {}
    for row in between(page, f'<caption id="{caption}"', "</table>").split("<tr")[1:]:
        cells = re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.DOTALL)
        texts = [
            amounts(cell)[0]
            if "<data" in cell
            else re.sub(r'<span class="under">.*?</span>|<svg.*?</svg>|<[^>]*>', "", cell, flags=re.DOTALL).strip()
            for cell in cells
        ]
        found[texts[0]] = texts[1:]
    return found


def shown(row: Row, names: Sequence[str] = AMOUNTS) -> list[str]:
    return ["–" if row[name] is None else row[name] for name in names]


async def test_every_total_is_the_shell_s(client: httpx.AsyncClient, usage: Callable[..., Any]) -> None:
    before = datetime.now(UTC).date()
    for slug, last in PERIODS.items():
        page = (await client.get("/dashboard", params={"period": slug})).text
        [total] = await usage("--by", "org", "--last", last)
        tiles = amounts(between(page, '<dl class="sums">', "</dl>"))
        assert tiles[:3] == shown(total)
        assert slug == "today" or Decimal(total["billed_adjustment"]) > 0
        prompt = sum(total[name] for name in TOKEN_CLASSES[:3])
        for text in (f"{total['operations']:,} operation", f"of {prompt:,} prompt tokens"):
            assert text in page
        assert f"{total['failed']:,} failed upstream, {total['refused']:,} refused" in page
        models = {row["model"]: shown(row, AMOUNTS[:2]) for row in await usage("--by", "model", "--last", last)}
        assert {name: cells[-2:] for name, cells in table(page, "models-caption").items() if name != "Model"} == {
            name: cells for name, cells in models.items() if name is not None
        }
    assert datetime.now(UTC).date() == before, "the day ended in the middle of this"


async def test_usage_by_anything_is_the_shell_s(client: httpx.AsyncClient, usage: Callable[..., Any]) -> None:
    before = datetime.now(UTC).date()
    for slug, by in (("30d", "team"), ("7d", "key"), ("30d", "tag:app"), ("today", "hour"), ("30d", "day")):
        page = (await client.get("/dashboard/usage", params={"by": by, "period": slug})).text
        rows = await usage("--by", by, "--last", PERIODS[slug])
        found = table(page, "usage-caption")
        assert [name for name in found if name not in (rows[0]["currency"], "All")][1:] == [row[by] for row in rows]
        for row in [*rows, (await usage("--by", "org", "--last", PERIODS[slug]))[0] | {by: "All"}]:
            prompt = sum(row[name] for name in TOKEN_CLASSES[:3])
            output = sum(row[name] for name in TOKEN_CLASSES[3:])
            cells = found[row[by]]
            assert cells[:2] == [f"{row['operations']:,}", f"{prompt:,}"]
            assert cells[3:7] == [f"{output:,}", *shown(row)]
    days, of_hours = [
        (await client.get("/dashboard/usage", params={"by": by, "period": "7d"})).text for by in ("day", "hour")
    ]
    assert table(days, "usage-caption") == table(of_hours, "usage-caption")
    assert "by=hour" in (await client.get("/dashboard/usage?by=day&period=today")).text and "by=hour" not in of_hours
    assert (await client.get("/dashboard/usage?by=colour")).status_code == 404
    assert datetime.now(UTC).date() == before, "the day ended in the middle of this"


async def test_each_user_and_each_day_is_the_shell_s(client: httpx.AsyncClient, usage: Callable[..., Any]) -> None:
    before = datetime.now(UTC).date()
    page = (await client.get("/dashboard")).text
    users = table(page, "users-caption")
    expected: dict[str, list[str]] = {}
    for last in PERIODS.values():
        rows = {row["user"]: row for row in await usage("--by", "user", "--last", last)}
        rows["All"] = (await usage("--by", "org", "--last", last))[0]
        for name in users.keys() - {"User", "Billed"}:
            expected.setdefault(name, []).extend(shown(rows[name]) if name in rows else ["no operations"])
    assert {name: users[name] for name in expected} == expected and len(expected) > 7
    days = {row["day"]: row for row in await usage("--by", "day", "--last", "30d")}
    spend, tokens = table(page, "spending-caption"), table(page, "tokens-caption")
    assert len(days) > 25
    for day, row in days.items():
        assert spend[day] == [f"{row['operations']:,}", *shown(row, AMOUNTS[:2])]
        assert tokens[day] == [f"{row[name]:,}" for name in TOKEN_CLASSES]
    assert datetime.now(UTC).date() == before, "the day ended in the middle of this"


async def test_an_operation_shows_what_was_recorded_what_changed_and_why(
    client: httpx.AsyncClient, adjusted: AsyncEngine, usage: Callable[..., Any]
) -> None:
    listed = table((await client.get("/dashboard/operations")).text, "operations-caption")
    async with adjusted.connect() as connection:
        latest = await latest_operations(connection)
        explained = [await explain(connection, each.id) for each in latest]
    for each, found in zip(latest, explained, strict=True):
        assert found is not None
        assert (each.billed, each.cost) == (found.billed, found.cost), "the list counts adjustments as a page does"
        assert bool(found.adjustments) == (each.billed_delta is not None or each.cost_delta is not None)
    assert {each.model for each in latest if each.cost_delta} == {HOSTED}
    for wanted in (SMALL, HOSTED):
        one = next(each for each in latest if each.model == wanted and each.status == "ok")
        cells = listed[f"{one.started_at:%Y-%m-%d %H:%M:%S}"]
        shell = await usage("explain", str(one.id))
        page = (await client.get(f"/dashboard/operations/{one.id}")).text
        assert amounts(between(page, '<dl class="sums">', "</dl>"))[:1] == [shell["billed"]] == cells[-2:-1]
        [change] = [cells for name, cells in table(page, "adjustments-caption").items() if name != "Made (UTC)"]
        [adjustment] = shell["adjustments"]
        deltas = [adjustment["billed_delta"] or "no change", adjustment["cost_delta"] or "no change"]
        assert change == ["1", *deltas, REASON, "shell:ada"]


async def test_a_member_sees_what_changed_about_their_bill_and_not_about_costs(adjusted: AsyncEngine) -> None:
    async with adjusted.begin() as connection:
        latest = await latest_operations(connection)
        seen = {}
        for model in (SMALL, HOSTED):
            one = next(each for each in latest if each.model == model and (each.billed_delta or each.cost_delta))
            found = await explain(connection, one.id)
            assert found is not None
            user_id = found.operation.record.user_id
            seen[one.id] = await create_administrator(connection, "M", "member", user_id=user_id, email=f"{model}@a.de")
    async with visitor(mount(adjusted)) as client:
        pages = []
        for operation_id, member in seen.items():
            client.cookies.set(COOKIE, Sessions(KEY_HASH).issue(str(member)), domain="farthing.test")
            pages.append((await client.get(f"/dashboard/operations/{operation_id}")).text)
            others = [(await client.get(path)).text for path in ("/dashboard", "/dashboard/usage")]
            assert not re.search("[Cc]ost|Margin|shell:ada", "".join([pages[-1], *others]))
            assert (await client.get("/dashboard/usage?by=user")).status_code == 404
    assert [REASON in page for page in pages] == [True, False]
