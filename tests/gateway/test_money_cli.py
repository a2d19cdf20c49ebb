"""Budgets of several scopes, rollover, wallets and leases from a shell."""

import asyncio
import json
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.leases import Leases
from billing.notices import Notices
from tests.billing.replicas import admit
from tests.gateway.commands import farthing_inside
from tests.gateway.test_cli import give_prices


@pytest.fixture
async def run(database_url: str) -> Any:
    await give_prices(database_url, "USD")

    async def shell(*arguments: str, fails: bool = False) -> str:
        result = farthing_inside(*arguments, FARTHING_DATABASE_URL=database_url)
        assert (result.returncode != 0) is fails, result
        assert "Traceback" not in result.stderr
        return result.stderr if fails else result.stdout

    return shell


async def test_budgets_of_several_scopes_and_rollover(run: Any) -> None:
    made = await run(
        *("budgets", "set", "model", "big", "50", "--and", "tag=app=search"), "--rollover", "--rollover-cap", "20"
    )
    assert made == "model big and tag app=search: 50 USD, window month\n"
    (row,) = json.loads(await run("budgets", "list", "--json"))
    assert (row["scope"], row["scope_id"], row["also"]) == ("tag", "app=search", "model big")
    assert row["rolled_over"] == "0"
    await run("limits", "set", "model", "big", "--and", "tag=app=search", "--requests", "5")
    (limit,) = json.loads(await run("limits", "list", "--json"))
    assert limit["also"] == "model big"
    for arguments, sentence in [
        (("--and", "model=large"), "'large' only says who shall answer; name the model itself"),
        (("--and", "model"), "'model' is no further scope; write it like model=gpt-5-mini"),
        (("--and", "tag=a=b", "--and", "tag=c=d"), "tag is there twice"),
        (("--and", "team=nobody"), "there is no organisation 'default'"),
        (("--rollover-cap", "5"), "set the rollover too"),
        (("--rollover-cap", "much"), "'much' is not an amount"),
    ]:
        assert sentence in await run("budgets", "set", "model", "m", "1", *arguments, fails=True)


async def test_a_wallet(run: Any) -> None:
    made = await run("wallets", "create", "tag", "app=search", "--and", "model=big")
    wallet = made.split()[made.split().index("wallet") + 1].rstrip(",")
    assert made.startswith("tag app=search and model big: wallet ") and "empty" in made
    said = await run("wallets", "top-up", wallet, "12.50", "--expires", "2100-01-01", "--note", "invoice 7")
    assert said == "balance 12.50 USD, of which 12.50 is available\n"
    refused = await run("wallets", "refund", wallet, "1", fails=True)
    assert "1 cannot be given back: calls were charged 0 from this wallet" in refused
    await run("wallets", "top-up", wallet, "1")
    assert "balance 11.50 USD" in await run("wallets", "adjust", wallet, "-2", "--note", "typed twice")
    (row,) = json.loads(await run("wallets", "show", wallet, "--json"))
    assert (row["balance"], row["available"], row["expiring"]) == ("11.50", "11.50", "10.50")
    assert [row["id"] for row in json.loads(await run("wallets", "list", "--json"))] == [wallet]
    entries = json.loads(await run("wallets", "entries", wallet, "--json"))
    assert [(entry["kind"], entry["amount"]) for entry in entries] == [
        ("adjustment", "-2"),
        ("top_up", "1"),
        ("top_up", "12.50"),
    ]
    assert entries[2]["note"] == "invoice 7" and entries[2]["actor"].startswith("shell:")
    assert "has a wallet; top that one up" in await run(
        "wallets", "create", "model", "big", "--and", "tag=app=search", fails=True
    )
    assert "cannot be taken: 11.50 is available" in await run(
        "wallets", "adjust", wallet, "-12", "--note", "x", fails=True
    )
    assert "there is no wallet" in await run("wallets", "show", "01" * 16, fails=True)
    assert await run("wallets", "close", wallet, "--note", "over") == (
        f"wallet {wallet} is closed: calls are not paid from it any more\n"
    )
    (row,) = json.loads(await run("wallets", "list", "--json"))
    assert row["balance"] == "0.00" and row["closed_at"]
    assert "opens it again" in await run("wallets", "top-up", wallet, "1", fails=True)
    again = await run("wallets", "create", "model", "big", "--and", "tag=app=search")
    assert wallet in again


async def test_an_amount_below_0_is_one_and_no_option(run: Any) -> None:
    wallet = (await run("wallets", "create", "model", "m")).split("wallet ")[1].split(",")[0]
    await run("wallets", "top-up", wallet, "5")
    assert "balance 3.75 USD" in await run("wallets", "adjust", "--note", "x", wallet, "-1.25")
    for command in (("wallets", "top-up", wallet), ("wallets", "refund", wallet), ("budgets", "set", "model", "m")):
        assert "-1.25" in (said := await run(*command, "-1.25", fails=True)) and "0 or more" in said, said
    assert "No such option: --expire" in await run(
        "wallets", "top-up", wallet, "5", "--expire", "2100-01-01", fails=True
    )


async def test_the_leases_of_a_lost_gateway(run: Any, engine: AsyncEngine) -> None:
    await run("budgets", "set", "model", "m", "16", "--window", "none")
    lost = Leases(engine, "lost.1", "USD", Notices(engine))
    task = asyncio.create_task(lost.run())
    await admit(lost, "3", model="m")
    task.cancel()
    (row,) = json.loads(await run("leases", "list", "--json"))
    assert (row["replica"], row["alive"], row["leases"], row["held"]) == ("lost.1", True, 1, "3 USD")
    assert "it lives, and gives back" in await run("leases", "free", "lost.1", "--yes", fails=True)
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE replica SET renewed_at = now() - interval '1 hour'"))
    assert "'lost.2' has no lease" in await run("leases", "free", "lost.2", fails=True)
    assert "Aborted" in await run("leases", "free", "lost.1", fails=True)  # nobody there to say yes
    assert await run("leases", "free", "lost.1", "--yes") == "freed 1 lease of lost.1\n"
    assert await run("leases", "list") == "none\n"


async def test_a_schema_of_another_version(run: Any, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE budget RENAME COLUMN also TO older"))
    assert "`farthing migrate` or a new `farthing up`" in await run("budgets", "list", fails=True)


async def test_people_see_names_in_place_of_ids(run: Any) -> None:
    await run("orgs", "create", "acme")
    await run("teams", "create", "search", "--org", "acme")
    await run("keys", "create", "editor", "--user", "ada")
    await run("budgets", "set", "team", "search", "5", "--org", "acme", "--and", "model=m")
    await run("limits", "set", "user", "ada", "--requests", "5")
    await run("wallets", "create", "org", "acme")
    await run("prices", "set", "--org", "acme", "--factor", "0.8")
    (team,) = json.loads(await run("teams", "list", "--json"))
    (row,) = json.loads(await run("budgets", "list", "--json"))
    assert (row["scope"], row["scope_id"], row["name"]) == ("team", team["id"], "acme/search")
    for listed, words in (
        ("budgets", "team acme/search │ model m"),
        ("limits", "│ user ada "),
        ("wallets", "│ org acme "),
        ("prices", " for org acme "),
    ):
        assert words in await run(listed, "list")
