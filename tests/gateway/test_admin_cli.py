"""People and administrators from the shell, and what the audit log says of it."""

import getpass
import json
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from billing.administrators import find_token
from tests.gateway.commands import Outcome, farthing_inside


@pytest.fixture
def run(database_url: str) -> Callable[..., Outcome]:
    environment = {"FARTHING_DATABASE_URL": database_url.replace("+asyncpg", "")}
    return lambda *arguments: farthing_inside(*arguments, **environment)


def rows(result: Any) -> list[dict[str, Any]]:
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


async def test_people_are_made_listed_renamed_and_moved(run: Any) -> None:
    rows(run("orgs", "create", "acme", "--json"))
    rows(run("teams", "create", "search", "--org", "acme", "--json"))
    rows(run("users", "create", "ada", "--org", "acme", "--team", "search", "--json"))
    assert run("orgs", "rename", "acme", "umbrella").stdout == "acme is umbrella now\n"
    assert run("teams", "rename", "search", "find", "--org", "umbrella").returncode == 0
    assert run("users", "rename", "ada", "grace", "--org", "umbrella").returncode == 0
    [user] = rows(run("users", "list", "--json"))
    assert (user["name"], user["org"], user["team"]) == ("grace", "umbrella", "find")
    assert run("users", "move", "grace", "--org", "umbrella").stdout == "grace is in no team now\n"
    assert rows(run("users", "list", "--org", "umbrella", "--json"))[0]["team"] is None
    entries = rows(run("audit", "list", "--json"))
    assert {entry["actor"] for entry in entries} == {f"shell:{getpass.getuser()}"}
    assert [(entry["action"], entry["noun"]) for entry in entries[:2]] == [("change", "user"), ("change", "user")]
    assert entries[1]["before"]["name"] == "ada" and entries[1]["after"]["name"] == "grace"
    shown = run("audit", "list", "--limit", "1").stdout
    assert "team id: " in shown.replace("_", " ") and "→ none" in shown


MISTAKES = [
    (["orgs", "create", " "], "visible character"),
    (["orgs", "rename", "nobody", "x"], "there is no organisation 'nobody'; `farthing orgs list` shows all"),
    (["teams", "rename", "x", "y"], "there is no organisation 'default'"),
    (["admins", "create", "Eve", "--role", "king"], "'king' is not a role; use one of member, billing_reader"),
    (["admins", "create", "Eve", "--role", "member"], "a member is one user"),
    (["admins", "create", "Eve", "--role", "admin", "--email", "eve"], "'eve' is not an e-mail address"),
    (["admins", "create", "Eve", "--role", "admin", "--org", "x"], "there is no organisation 'x'"),
    (["admins", "revoke", "eve@example.com"], "there is no administrator 'eve@example.com'"),
    (["admins", "revoke-token", "01a229c4-4e18-7002-8403-e804911d62a0"], "there is no token"),
]


async def test_mistakes_are_told_in_a_sentence(run: Any) -> None:
    for arguments, sentence in MISTAKES:
        result = run(*arguments)
        assert result.returncode == 1 and sentence in result.stderr and "Traceback" not in result.stderr, result.stderr


async def test_administrators_and_their_tokens(run: Any, database_url: str) -> None:
    [made] = rows(run("admins", "create", "Eve", "--role", "owner", "--email", "Eve@Example.com", "--json"))
    assert (made["email"], made["org"], made["signs_in"]) == ("eve@example.com", None, "not yet")
    again = run("admins", "create", "Eve", "--role", "admin", "--email", "eve@example.com")
    assert again.returncode == 1 and "there is an administrator with the address" in again.stderr
    [token] = rows(run("admins", "token", "eve@example.com", "--role", "billing_reader", "--json"))
    engine = create_async_engine(database_url)
    async with engine.connect() as conn:
        caller = await find_token(conn, token["token"])
    assert caller is not None and caller.role == "billing_reader" and "eve@example.com" in caller.actor
    assert run("admins", "role", made["id"], "admin").returncode == 0
    assert rows(run("admins", "tokens", "--json"))[0]["prefix"] == token["token"][:9]
    assert run("admins", "revoke-token", token["id"]).returncode == 0
    assert run("admins", "revoke", "eve@example.com").returncode == 0
    async with engine.connect() as conn:
        assert await find_token(conn, token["token"]) is None
    await engine.dispose()
    entries = rows(run("audit", "list", "--json"))
    assert [(entry["action"], entry["noun"]) for entry in entries] == [
        *(("change", "administrator"), ("change", "token"), ("change", "administrator")),
        *(("create", "token"), ("create", "administrator")),
    ]
    assert token["token"] not in json.dumps(entries) and "hash" not in json.dumps(entries)
