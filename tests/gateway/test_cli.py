"""The `farthing` command as a shell sees it: output, exit code, one sentence when something is wrong."""

import json
import os
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from billing.prices import PriceTerms, seed

FARTHING = Path(sys.executable).with_name("farthing")


def farthing(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [FARTHING, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "60", **environment},
        timeout=60,
        check=False,
    )


async def give_prices(database_url: str, currency: str) -> None:
    """What a gateway that bills in `currency` does at its first start."""
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        await seed(connection, [PriceTerms(book="sale", model="m", currency=currency, input_fresh=Decimal(1))])
    await engine.dispose()


def test_help_is_quick_and_names_every_command() -> None:
    began = time.monotonic()
    result = farthing("--help")
    assert time.monotonic() - began < 2
    for command in ("up", "test", "engine", "models", "gateway", "migrate", "keys", "budgets"):
        assert command in result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, gateway.cli; print([m for m in ('torch', 'sqlalchemy', 'litestar', 'engine') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["keys", "list", "--data-dir", "/nowhere"], "/nowhere has no up.json"),
        (["keys", "list", "--database-url", "nonsense"], "'nonsense' is not a database URL"),
        (["keys", "list", "--database-url", "postgresql://me:hidden@host:port/x"], "'host:port/x' is not a database"),
        (["keys", "list", "--database-url", "sqlite:///x"], "needs PostgreSQL"),
        (["keys", "list", "--database-url", "postgresql://127.0.0.1:1/x"], "cannot connect to"),
        (["keys", "list", "--database-url", "postgresql://me:hidden@127.0.0.1:1/x"], "me:***@127.0.0.1:1"),
        (["migrate", "--database-url", "postgresql://127.0.0.1:1/x"], "could not migrate the database"),
        (["up", "--port", "48613", "--database-url", "postgresql://127.0.0.1:1/x", "--no-engine"], "cannot connect to"),
    ],
)
def test_a_bad_database_is_named_in_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    result = farthing(*arguments, FARTHING_DATA=str(tmp_path))
    assert result.returncode == 1
    assert sentence in result.stderr and "Traceback" not in result.stderr and "hidden" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("content", [b"models = { }", b"\xff", b'roles = "x"', b"models = 5", None])
def test_up_with_a_configuration_it_cannot_use(content: bytes | None, tmp_path: Path) -> None:
    config = tmp_path / "farthing.toml"
    config.mkdir() if content is None else config.write_bytes(content)
    result = farthing("up", "--port", "48614", "--no-engine", "--data-dir", str(tmp_path))
    assert result.returncode == 1 and result.stdout == ""
    assert str(config) in result.stderr and "Traceback" not in result.stderr
    assert content is None or config.read_bytes() == content


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["up", "--port", "70000"],
        ["up", "--nonsense"],
        ["keys", "revoke", "x"],
        ["keys", "create", "k", "--days", "99999999999"],
    ],
)
def test_bad_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert farthing(*arguments).returncode == 2


class TestAdministration:
    """keys and budgets, on a real database."""

    @pytest.fixture
    def run(self, database_url: str) -> Any:
        # As a person would write it: asyncpg is our affair.
        environment = {"FARTHING_DATABASE_URL": database_url.replace("+asyncpg", "")}
        return lambda *arguments: farthing(*arguments, **environment)

    async def test_create_list_revoke(self, run: Any) -> None:
        made = run("keys", "create", "ci [runner]", "--user", "ada", "--team", "research", "--days", "30", "--json")
        assert made.returncode == 0, made.stderr
        [key] = json.loads(made.stdout)
        assert key["key"].startswith("fk-")
        second = json.loads(run("keys", "create", "again", "--user", "ada", "--team", "research", "--json").stdout)
        assert second[0]["key"] != key["key"]  # the same ada: a taken name is no error here
        listed = json.loads(run("keys", "list", "--json").stdout)
        assert [row["name"] for row in listed] == ["ci [runner]", "again"]
        assert listed[0]["prefix"] == key["key"][: len(listed[0]["prefix"])] and listed[0]["expires_at"]
        assert key["key"] not in run("keys", "list", "--json").stdout
        assert run("keys", "revoke", key["id"]).stdout == f"revoked {key['id']}\n"
        assert json.loads(run("keys", "list", "--json").stdout)[0]["revoked_at"]
        assert "[runner]" in run("keys", "list").stdout  # not taken for markup
        unknown = run("keys", "revoke", "00000000-0000-0000-0000-000000000000")
        assert unknown.returncode == 1 and "there is no key" in unknown.stderr

    async def test_the_table_shows_a_key_in_full(self, run: Any) -> None:
        shown = run("keys", "create", "narrow").stdout
        listed = json.loads(run("keys", "list", "--json").stdout)
        assert listed[0]["id"] in shown
        assert len(next(word for word in shown.split() if word.startswith("fk-"))) > 40

    async def test_a_budget_takes_the_currency_that_the_gateway_bills_in(self, run: Any, database_url: str) -> None:
        unknown = run("budgets", "set", "model", "m", "1")
        assert unknown.returncode == 1 and "no prices yet; start the gateway once" in unknown.stderr
        nonsense = run("budgets", "set", "model", "early", "1", "--currency", "usd!")
        assert nonsense.returncode == 1 and "three capital letters" in nonsense.stderr
        assert run("budgets", "set", "model", "early", "1", "--currency", "USD").returncode == 0
        await give_prices(database_url, "EUR")
        assert run("budgets", "set", "model", "m", "1").stdout == "model m: 1 EUR, window month\n"
        assert run("budgets", "set", "model", "m", "2", "--currency", "EUR").returncode == 0
        other = run("budgets", "set", "model", "m", "3", "--currency", "USD")
        assert other.returncode == 1 and "the gateway bills in EUR" in other.stderr
        early = run("budgets", "set", "model", "early", "3")
        assert early.returncode == 1 and "remove that one first" in early.stderr
        rows = {row["scope_id"]: row for row in json.loads(run("budgets", "list", "--json").stdout)}
        assert (rows["m"]["limit"], rows["m"]["currency"]) == ("2", "EUR")

    async def test_a_budget_is_set_changed_listed_removed(self, run: Any, database_url: str) -> None:
        await give_prices(database_url, "USD")
        [key] = json.loads(run("keys", "create", "k", "--user", "ada", "--json").stdout)
        assert run("budgets", "set", "key", key["id"], "12.50", "--window", "day").returncode == 0
        assert run("budgets", "set", "key", key["key"][:8], "15", "--window", "day").returncode == 0
        assert run("budgets", "set", "user", "ada", "0.001", "--soft").returncode == 0
        assert run("budgets", "set", "org", "default", "100", "--window", "none").returncode == 0
        rows = sorted(json.loads(run("budgets", "list", "--json").stdout), key=lambda row: row["scope"])
        assert [(row["scope"], row["limit"], row["hard"]) for row in rows] == [
            ("key", "15", True),
            ("org", "100", True),
            ("user", "0.001", False),
        ]
        assert rows[0]["scope_id"] == key["id"]
        assert run("budgets", "remove", rows[0]["id"]).returncode == 0
        assert run("budgets", "remove", rows[0]["id"]).returncode == 1

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["key", "fk-none", "1"], "no keys are called 'fk-none'"),
            (["user", "nobody", "1"], "there is no organisation 'default'"),
            (["org", "nobody", "1"], "there is no organisation 'nobody'"),
            (["planet", "earth", "1"], "is not a scope"),
            (["model", "small", "much"], "'much' is not an amount"),
            (["model", "small", "NaN"], "limit"),
            (["model", "small", "1e400"], "must be below 1000000000000000"),
            (["model", "small", "1e-400"], "18 decimals at most"),
            (["model", "small", "1", "--window", "year"], "'year' is not a window"),
            (["model", "small", "1", "--time-zone", "Mars"], "Mars"),
        ],
    )
    async def test_a_budget_that_could_not_apply_is_refused(
        self, run: Any, database_url: str, arguments: list[str], sentence: str
    ) -> None:
        await give_prices(database_url, "USD")
        result = run("budgets", "set", *arguments)
        assert result.returncode == 1 and sentence in result.stderr and "Traceback" not in result.stderr
