"""Migrations on databases that earlier releases have filled: all of it is there after, and down one and up again."""

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

import migrations
from billing import operations, people, prices, reports
from billing.budgets import list_budgets
from billing.ids import new_id
from billing.people import key_hash
from billing.rollups import refresh
from tests.billing.test_migrations import differences

AT = datetime(2026, 10, 3, 14, 30, tzinfo=UTC)
SECRET = "fk-of-an-earlier-release"
OPERATIONS = 50
RELEASES = ("0001", "0002", "0003", "0004")


async def fill(engine: AsyncEngine, release: str) -> None:
    """Rows as a release with this schema wrote them."""
    ids: dict[str, Any] = {name: new_id() for name in ("org", "team", "user", "key", "price", "budget")}
    ids |= {"at": AT, "hash": key_hash(SECRET)}
    key = "id, org_id, team_id, user_id, name, prefix"
    values = ":key, :org, :team, :user, 'laptop', 'fk-of-an'"
    statements = [
        "INSERT INTO org (id, name) VALUES (:org, 'Acme')",
        "INSERT INTO team (id, org_id, name) VALUES (:team, :org, 'Search')",
        "INSERT INTO app_user (id, org_id, team_id, name) VALUES (:user, :org, :team, 'Ada')",
        *(
            [f"INSERT INTO api_key ({key}, hash) VALUES ({values}, :hash)"]
            if release == "0001"
            else [
                f"INSERT INTO api_key ({key}) VALUES ({values})",
                "INSERT INTO key_secret (hash, key_id) VALUES (:hash, :key)",
            ]
        ),
        "INSERT INTO price_version (id, book, model, effective_at, currency, input_fresh, input_cached, output_text)"
        " VALUES (:price, 'sale', 'tiny', :at, 'USD', 10, 1, 20)",
        'INSERT INTO budget (id, scope_kind, scope_id, "window", limit_amount, currency)'
        " VALUES (:budget, 'org', CAST(CAST(:org AS uuid) AS text), 'none', 100, 'USD')",
        "INSERT INTO budget_window (budget_id, starts_at, settled) VALUES (:budget, :at, 1.25)",
        "INSERT INTO operation (id, started_at, org_id, team_id, user_id, key_id, tags, api, requested_model, model,"
        " stream, status, http_status, total_seconds, billed, cost, currency)"
        " SELECT gen_random_uuid(), CAST(:at AS timestamptz) + n * interval '1 minute', :org, :team, :user, :key,"
        " '{\"f\": \"x\"}', 'chat.completions', 'auto', 'tiny', true, 'ok', 200, 1, 0.025, NULL, 'USD'"
        f" FROM generate_series(1, {OPERATIONS}) AS n",
        "INSERT INTO attempt (operation_id, number, upstream, model, started_at, status, input_fresh, input_cached,"
        " input_cache_write, output_text, output_reasoning, usage_source, total_seconds, price_version_id, billed)"
        " SELECT id, 1, 'engine', 'tiny', started_at, 'ok', 100, 1000, 0, 5, 0, 'engine', 1, :price, billed"
        " FROM operation",
    ]
    async with engine.begin() as conn:
        for statement in statements:
            await conn.execute(text(statement), {name: ids[name] for name in ids if f":{name}" in statement})


async def check(engine: AsyncEngine) -> None:
    async with engine.connect() as conn:
        assert await conn.run_sync(differences) == []
        key = await people.find_key(conn, SECRET)
        assert key is not None and (key.name, key.record_payloads, key.tags) == ("laptop", False, {})
        sale = (await prices.load(conn)).sale("tiny")
        assert sale is not None and (sale.input_fresh, sale.output_text) == (10, 20)
        (budget,) = await list_budgets(conn)
        assert (budget.scope_id, budget.limit_amount, budget.hard) == (str(key.org_id), 100, True)
        (total,) = await reports.total_spending(conn, [AT])
        assert (total.windows[0].operations, total.windows[0].billed) == (OPERATIONS, Decimal("1.25"))
        (saved,) = await reports.cache_savings(conn, AT)
        assert saved.amount == OPERATIONS * 1000 * Decimal(9) / 10**6
        found = await operations.find_operation(conn, (await operations.latest_operations(conn, 1))[0].id)
        assert found is not None and found.record.attempts[0].tier == "standard" and found.user == "Ada"


async def test_the_ledger_is_neither_read_nor_written_by_a_migration(database_url: str, engine: AsyncEngine) -> None:
    """However many rows it has: its tables are locked for a moment, not for as long as it takes to read them."""
    await asyncio.to_thread(migrations.downgrade, database_url, "base")
    await migrations._migrate(database_url, "upgrade", RELEASES[-1])
    await fill(engine, RELEASES[-1])
    async with engine.begin() as conn:
        name = (await conn.execute(text("SELECT current_database()"))).scalar_one()
        # Else the planner reads a table of so few rows whatever index it has.
        await conn.execute(text(f"ALTER DATABASE {name} SET enable_seqscan = off"))
    before = await touched(engine)
    assert sum(rows for *_, rows in before.values()) > 0
    await asyncio.to_thread(migrations.upgrade, database_url)
    assert await touched(engine) == before
    await asyncio.to_thread(migrations.downgrade, database_url, "-1")
    assert await touched(engine) == before


async def touched(engine: AsyncEngine) -> dict[str, tuple[int, int, int]]:
    """Of each of the ledger's tables: its file, how often it was read from end to end, how many rows it was written."""
    query = text("""
        SELECT c.relname, c.relfilenode, s.seq_scan, s.n_tup_ins + s.n_tup_upd + s.n_tup_del
        FROM pg_class c JOIN pg_stat_all_tables s ON s.relid = c.oid
        WHERE c.relkind = 'r' AND c.relname ~ '^(operation|attempt)_[0-9d]'
    """)
    others = text("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
    await engine.dispose()  # what a connection did is counted, at the latest, before the server has closed it
    async with engine.connect() as conn, asyncio.timeout(30):
        while (await conn.execute(others)).first() is not None:
            await conn.rollback()  # each transaction looks once
            await asyncio.sleep(0.05)
        await conn.rollback()
        return {row[0]: (row[1], row[2], row[3]) for row in await conn.execute(query)}


@pytest.mark.parametrize("release", RELEASES)
async def test_what_an_earlier_release_wrote_is_there(database_url: str, engine: AsyncEngine, release: str) -> None:
    await asyncio.to_thread(migrations.downgrade, database_url, "base")
    await migrations._migrate(database_url, "upgrade", release)
    await fill(engine, release)
    await asyncio.to_thread(migrations.upgrade, database_url)
    await check(engine)
    await refresh(engine)
    await check(engine)
    await asyncio.to_thread(migrations.downgrade, database_url, "-1")
    await asyncio.to_thread(migrations.upgrade, database_url)
    await check(engine)
