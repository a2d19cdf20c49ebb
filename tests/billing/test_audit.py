"""The audit log: every administrative table writes to it, nothing changes it, and no secret is in it."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import people
from billing.audit import AUDITED, act_as, list_entries
from billing.budgets import remove_budget, set_budget


def value(raw: msgspec.Raw | None) -> dict[str, Any] | None:
    return None if raw is None else msgspec.json.decode(raw)


async def test_the_triggers_are_those_that_are_listed(engine: AsyncEngine) -> None:
    query = text("""
        SELECT c.relname, encode(t.tgargs, 'escape') AS arguments FROM pg_trigger t
        JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_proc p ON p.oid = t.tgfoid WHERE p.proname = 'farthing_audit'
    """)
    async with engine.connect() as connection:
        found = {row.relname: row.arguments.split("\\000")[:-1] for row in await connection.execute(query)}
    assert found == {each.table: [each.noun, *each.hidden] for each in AUDITED}


async def test_a_change_is_noted_with_its_actor_before_and_after(conn: AsyncConnection) -> None:
    await act_as(conn, "shell:ada")
    org = await people.create_org(conn, "acme")
    key = await people.create_key(conn, org, "k")
    await people.revoke_key(conn, key.id)
    amount = Decimal("0.100000000000000001")
    budget = await set_budget(conn, "org", org, "month", amount, currency="USD")
    await set_budget(conn, "org", org, "month", Decimal(2), currency="USD")
    await remove_budget(conn, budget)
    removed, changed, made, revoked, *_ = await list_entries(conn, 10)
    assert {entry.actor for entry in (removed, changed, made, revoked)} == {"shell:ada"}
    assert [entry.action for entry in (removed, changed, made, revoked)] == ["remove", "change", "create", "change"]
    assert (made.noun, made.noun_id, made.before) == ("budget", str(budget), None)
    assert b"0.100000000000000001" in bytes(made.after or b"")
    before, after = value(changed.before), value(changed.after)
    assert before is not None and after is not None
    assert {name for name in before if before[name] != after[name]} == {"limit_amount"}
    assert removed.after is None and value(removed.before) == after
    assert revoked.noun == "key" and (value(revoked.after) or {})["revoked_at"] is not None


async def test_an_actor_lasts_one_transaction_and_nobody_is_the_database_s_user(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        async with connection.begin():
            await act_as(connection, "shell:ada")
            await people.create_org(connection, "one")
        async with connection.begin():
            await people.create_org(connection, "two")
            actors = [entry.actor for entry in await list_entries(connection, 2)]
    assert actors[1] == "shell:ada" and actors[0].startswith("database:")


async def test_what_changes_nothing_is_not_noted(conn: AsyncConnection) -> None:
    org = await people.create_org(conn, "acme")
    for _ in range(2):
        await set_budget(conn, "org", org, "month", Decimal(1), currency="USD")
    assert [entry.noun for entry in await list_entries(conn, 10)] == ["budget", "org"]


@pytest.mark.parametrize(
    "statement", ["UPDATE audit_log SET actor = 'me'", "DELETE FROM audit_log", "TRUNCATE audit_log"]
)
async def test_the_log_is_only_added_to(engine: AsyncEngine, statement: str) -> None:
    async with engine.begin() as connection:
        await people.create_org(connection, "acme")
    with pytest.raises(DBAPIError, match="the audit log is only ever added to"):
        async with engine.begin() as connection:
            await connection.execute(text(statement))
    async with engine.connect() as connection:
        assert len(await list_entries(connection, 10)) == 1


async def test_no_table_that_it_follows_can_be_emptied_past_it(engine: AsyncEngine) -> None:
    for each in AUDITED:
        with pytest.raises(DBAPIError, match="would leave no trace"):
            async with engine.begin() as connection:
                await connection.execute(text(f"TRUNCATE {each.table} CASCADE"))


async def test_no_secret_and_no_hash_is_in_it(conn: AsyncConnection) -> None:
    org = await people.create_org(conn, "acme")
    key = await people.create_key(conn, org, "k")
    newer = await people.rotate_key(conn, key.id, timedelta(hours=1))
    assert newer is not None
    log = "\n".join((await conn.execute(text("SELECT l::text FROM audit_log l"))).scalars())
    assert key.prefix in log and newer.prefix in log
    for secret in (key.secret, newer.secret):
        assert secret not in log and people.key_hash(secret).hex() not in log


async def test_pages_and_filters(conn: AsyncConnection) -> None:
    await act_as(conn, "one")
    org = await people.create_org(conn, "acme")
    for name in "abc":
        await people.create_team(conn, org, name)
    await act_as(conn, "two")
    await people.create_team(conn, org, "d")
    names = []
    older_than = None
    while page := await list_entries(conn, 2, older_than=older_than, noun="team"):
        names += [(value(entry.after) or {})["name"] for entry in page]
        older_than = page[-1].id
    assert names == ["d", "c", "b", "a"]
    assert len(await list_entries(conn, 10, actor="two")) == 1
    assert [entry.noun for entry in await list_entries(conn, 10, noun_id=str(org))] == ["org"]
