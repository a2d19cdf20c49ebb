"""`farthing prices …` as a shell sees it, on a real database."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from billing import people, prices
from billing.prices import PriceTerms
from tests.gateway.commands import farthing_inside

SMALL = PriceTerms(book="sale", model="small", currency="USD", input_fresh=Decimal("0.05"), output_text=Decimal("0.20"))


@pytest.fixture
async def shop(database_url: str) -> str:
    """A database with a price and the org acme with the team search."""
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        await prices.seed(connection, [SMALL])
        org = await people.create_org(connection, "acme")
        await people.create_team(connection, org, "search")
    await engine.dispose()
    return database_url


async def run(shop: str, *arguments: str, code: int = 0) -> str:
    done = farthing_inside(*arguments, "--database-url", shop, COLUMNS="200")
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


async def rows(shop: str, *arguments: str) -> Any:
    return json.loads(await run(shop, *arguments, "--json"))


async def test_a_file_is_shown_then_entered_as_a_whole(shop: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text(
        "model,org,team,input_fresh,output_text,factor\nsmall,,,0.06,0.20,\nbig,,,1,2,\n,acme,search,,,0.8\n"
    )
    dry = await rows(shop, "prices", "import", str(file), "--dry-run")
    assert [(row["change"], row["price"].partition(",")[0]) for row in dry] == [
        ("changed", "sale of small"),
        ("new", "sale of big"),
        ("new", "sale of every model"),
    ]
    assert dry[0]["parts"]["input_fresh"] == {"before": "0.05", "after": "0.06"}
    assert len(await rows(shop, "prices", "list")) == 1
    assert "entered 3 of 3" in await run(shop, "prices", "import", str(file))
    assert [row["change"] for row in await rows(shop, "prices", "diff", str(file))] == ["same"] * 3
    listed = await rows(shop, "prices", "list")
    assert {(row["model"], row["state"], row["factor"]) for row in listed} == {
        ("small", "in force", None),
        ("big", "in force", None),
        ("", "in force", "0.8"),
    }
    assert [row["state"] for row in await rows(shop, "prices", "list", "--all", "--model", "small")] == [
        "past",
        "in force",
    ]
    file.write_text("model,team,input_fresh,factor\nnew,,1,\n,nobody,,2\nbad,,x,\n")
    error = await run(shop, "prices", "import", str(file), code=1)
    assert f"{file}:4: input_fresh is 'x'" in error
    file.write_text("model,team,input_fresh,factor\nnew,,1,\n,nobody,,2\n")
    error = await run(shop, "prices", "import", str(file), code=1)
    assert f"{file}:3: there is no organisation 'default'" in error
    assert not [row for row in await rows(shop, "prices", "list") if row["model"] == "new"]


async def test_the_list_fits_a_terminal(shop: str) -> None:
    name = "claude-sonnet-4-5-20250929"
    cost = ("--upstream", "anthropic", "--input-fresh", "3", "--input-cached", "0.3", "--input-cache-write", "3.75")
    await run(shop, "prices", "set", name, *cost, "--output-text", "15", "--per-image", "0.0048")
    await run(shop, "prices", "set", "--org", "acme", "--team", "search", "--factor", "0.8")
    listed = await run(shop, "prices", "list")
    assert max(map(len, listed.splitlines())) <= 100
    for row in await rows(shop, "prices", "list"):
        assert row["id"] in listed, "what --corrects takes"
    for words in (
        f"cost of {name} on anthropic",
        "cache write 3.75",
        "per image 0.0048",
        "team acme/search",
        "factor 0.8",
    ):
        assert words in listed
    assert "in force, USD" in listed


async def test_one_price_corrected_and_re_rated(shop: str) -> None:
    (row,) = await rows(shop, "prices", "set", "small", "--input-fresh", "0.07")
    assert row["parts"] == {"input_fresh": {"before": "0.05", "after": "0.07"}}
    assert row["terms"]["output_text"] == "0.20", "what is not given stays"
    wrong = (await rows(shop, "prices", "list"))[0]["id"]
    (row,) = await rows(shop, "prices", "set", "--corrects", wrong, "--input-fresh", "0.08")
    assert row["change"] == "changed"
    (row,) = await rows(shop, "prices", "rerate", "--from", "2026-01-01", "--reason", "typing error")
    assert row == {"attempts": 0, "adjusted": 0, "unpriced": 0, "billed": {}, "cost": {}}
    await run(shop, "prices", "set", "--org", "acme", "--factor", "0.9")
    await run(shop, "prices", "set", "--upstream", "gpu", "--device-hour", "2.50")
    await run(shop, "prices", "set", "small", "--end")
    assert {(row["book"], row["model"]) for row in await rows(shop, "prices", "list")} == {("sale", ""), ("cost", "")}
    assert await rows(shop, "devices", "--from", "2026-01-01") == []
    assert await rows(shop, "margins", "--from", "2026-01-01", "--by", "tag:scenario") == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["set", "small"], "give at least one part of the price, or --end"),
        (["set", "small", "--factor", "2"], "a factor is for an override"),
        (["set", "small", "--input-fresh", "free"], "input_fresh is 'free'; write an amount"),
        (["set", "small", "--input-fresh", "1", "--effective", "tomorrow"], "'tomorrow' is not a moment"),
        (["set", "small", "--input-fresh", "1", "--key", "k", "--org", "o"], "an override is of one org, team or key"),
        (["set", "small", "--input-fresh", "1", "--org", "nobody"], "there is no organisation 'nobody'"),
        (["set", "small", "--input-fresh", "1", "--corrects", "0" * 32], "--corrects says which price"),
        (["set", "--input-fresh", "1"], "a list price names its model"),
        (["rerate", "--from", "2026-01-02", "--to", "2026-01-01", "--reason", "r"], "is not after its start"),
        (["check", "/nowhere/farthing.toml"], "/nowhere/farthing.toml"),
    ],
)
async def test_what_is_wrong_is_one_sentence(shop: str, arguments: list[str], sentence: str) -> None:
    assert sentence in await run(shop, "prices", *arguments, code=1)


async def test_the_book_beside_the_public_catalogue(shop: str, tmp_path: Path) -> None:
    config = tmp_path / "farthing.toml"
    config.write_text(
        """
        [roles]
        small = "tiny"
        large = "fast"
        [upstreams.openai]
        kind = "openai"
        [upstreams.mine]
        kind = "vllm"
        [models.tiny]
        upstreams = ["mine"]
        [models.fast]
        upstreams = [{ upstream = "openai", upstream_model = "gpt-4o" }]
        [models.other]
        upstreams = [{ upstream = "openai", upstream_model = "no-such-model" }]
        """
    )
    await run(shop, "prices", "set", "tiny", "--input-fresh", "1", "--output-text", "2")
    await run(shop, "prices", "set", "fast", "--upstream", "openai", "--input-fresh", "99", "--output-text", "10")
    found = [
        (row["model"], row["upstream"], row["what"], row["ours"])
        for row in await rows(shop, "prices", "check", str(config))
    ]
    unpriced = "no price: its charge is unknown, and a hard budget refuses it"
    assert ("fast", None, unpriced, None) in found
    assert (
        "tiny",
        None,
        "no price for input_cached: a hard budget refuses it",
        None,
    ) in found
    assert ("tiny", "mine", "no cost: its margin is unknown", None) in found
    assert ("fast", "openai", "cost of input_fresh", "99") in found
    assert not [row for row in found if row[2] == "cost of output_text"], "as the catalogue has it"
    assert ("other", "openai", "not in the public catalogue", None) in found
