"""The `farthing` command as a shell sees it: output, exit code, one sentence when something is wrong."""

import json
import resource
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from billing.prices import PriceTerms, seed
from tests.gateway.commands import farthing, farthing_inside


async def give_prices(database_url: str, currency: str) -> None:
    """What a gateway that bills in `currency` does at its first start."""
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        await seed(connection, [PriceTerms(book="sale", model="m", currency=currency, input_fresh=Decimal(1))])
    await engine.dispose()


def test_help_is_quick_and_names_every_command() -> None:
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = farthing("--help")
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 2  # seconds of CPU
    for command in ("up", "test", "engine", "models", "gateway", "migrate", "keys", "budgets", "limits"):
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
        ["keys", "restrict"],
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
        return lambda *arguments: farthing_inside(*arguments, **environment)

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
        for nobody in ("00000000-0000-0000-0000-000000000000", "fk-none"):
            unknown = run("keys", "revoke", nobody)
            assert unknown.returncode == 1 and "there is no key" in unknown.stderr

    async def test_a_key_is_restricted_shown_and_freed_again(self, run: Any) -> None:
        lists = ["--model", "auto", "--model", "tiny", "--route", "messages", "--network", "10.0.0.0/8", "--tag", "a=b"]
        [key] = json.loads(run("keys", "create", "k", *lists, "--may-attribute", "--json").stdout)
        [shown] = json.loads(run("keys", "show", key["id"], "--json").stdout)
        assert (shown["models"], shown["routes"], shown["networks"]) == ("auto, tiny", "messages", "10.0.0.0/8")
        assert (shown["tags"], shown["may_attribute"], shown["expires_at"]) == ("a=b", "yes", None)
        [listed] = json.loads(run("keys", "list", "--json").stdout)
        assert listed["restricted"] == "models, routes, networks"
        assert run("keys", "restrict", key["id"], "--model", "any", "--tag", "any", "--days", "9").returncode == 0
        [shown] = json.loads(run("keys", "show", shown["prefix"], "--json").stdout)
        assert (shown["models"], shown["routes"], shown["tags"]) == (None, "messages", None)
        assert shown["expires_at"] and shown["may_attribute"] == "yes"
        assert run("keys", "restrict", key["id"], "--no-may-attribute", "--days", "0").returncode == 0
        table = run("keys", "show", key["id"]).stdout
        assert "10.0.0.0/8" in table and key["key"] not in table

    async def test_a_restriction_that_makes_no_sense(self, run: Any) -> None:
        [key] = json.loads(run("keys", "create", "k", "--json").stdout)
        for options, sentence in [
            ([], "nothing to change"),
            (["--route", "chat"], "there is no route 'chat'; there are chat.completions"),
            (["--network", "10.0.0.1/8"], "has host bits set; write a range like"),
            (["--tag", "scenario"], "'scenario' is no tag"),
            (["--tag", "org=acme"], "'org' cannot be a tag"),
            (["--model", ""], "a model's name needs"),
        ]:
            result = run("keys", "restrict", key["id"], *options)
            assert result.returncode == 1 and sentence in result.stderr, result.stderr

    async def test_a_key_is_rotated(self, run: Any) -> None:
        [old] = json.loads(run("keys", "create", "k", "--json").stdout)
        [new] = json.loads(run("keys", "rotate", old["id"], "--hours", "1.5", "--json").stdout)
        assert new["id"] == old["id"] and new["key"] != old["key"] and new["old_secret_works_until"]
        [shown] = json.loads(run("keys", "show", old["id"], "--json").stdout)
        assert shown["prefix"] == new["key"][:8]
        [last] = json.loads(run("keys", "rotate", old["id"], "--hours", "0", "--json").stdout)
        assert last["old_secret_works_until"] is None
        run("keys", "revoke", old["id"])
        refused = run("keys", "rotate", old["id"])
        assert refused.returncode == 1 and "is revoked; make a new one" in refused.stderr

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

    async def test_limits_are_set_changed_listed_removed(self, run: Any) -> None:
        [key] = json.loads(run("keys", "create", "k", "--user", "ada", "--json").stdout)
        made = run("limits", "set", "key", key["key"][:8], "--requests", "60", "--tokens", "100000")
        assert made.stdout == f"key {key['key'][:8]}: 60 requests a minute, 100000 tokens a minute\n"
        assert run("limits", "set", "key", key["id"], "--requests", "30").returncode == 0
        assert run("limits", "set", "tag", "app=search", "--concurrent", "4").returncode == 0
        rows = json.loads(run("limits", "list", "--json").stdout)
        assert {(row["scope"], row["kind"], row["limit"]) for row in rows} == {
            ("key", "requests", 30),
            ("key", "tokens", 100000),
            ("tag", "concurrent", 4),
        }
        assert json.loads(run("budgets", "list", "--json").stdout) == []
        assert run("budgets", "remove", rows[0]["id"]).returncode == 1
        assert run("limits", "remove", rows[0]["id"]).returncode == 0
        assert run("limits", "remove", rows[0]["id"]).returncode == 1
        for arguments, sentence in [
            (["key", key["id"]], "say what to limit"),
            (["tag", "search", "--requests", "1"], "write it as name=value"),
            (["user", "nobody", "--requests", "1"], "there is no user 'nobody'"),
        ]:
            result = run("limits", "set", *arguments)
            assert result.returncode == 1 and sentence in result.stderr, result.stderr

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["key", "fk-none", "1"], "there is no key 'fk-none'"),
            (["user", "nobody", "1"], "there is no organisation 'default'"),
            (["org", "nobody", "1"], "there is no organisation 'nobody'"),
            (["planet", "earth", "1"], "is not a scope"),
            (["tag", "search", "1"], "'search' is not a tag; write it as name=value"),
            (["model", "m", "much"], "'much' is not an amount"),
            (["model", "m", "NaN"], "limit"),
            (["model", "m", "1e400"], "must be below 1000000000000000"),
            (["model", "m", "1e-400"], "18 decimals at most"),
            (["model", "m", "1", "--window", "year"], "'year' is not a window"),
            (["model", "m", "1", "--time-zone", "Mars"], "Mars"),
        ],
    )
    async def test_a_budget_that_could_not_apply_is_refused(
        self, run: Any, database_url: str, arguments: list[str], sentence: str
    ) -> None:
        await give_prices(database_url, "USD")
        result = run("budgets", "set", *arguments)
        assert result.returncode == 1 and sentence in result.stderr and "Traceback" not in result.stderr
