"""Rows of every table, written as the release that made the table wrote them: each later migration leaves them be."""

import asyncio
import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

import migrations
from billing import prices
from billing.administrators import list_administrators
from billing.alerts.channels import list_channels
from billing.alerts.history import list_alerts
from billing.alerts.rules import list_rules
from billing.breakdown import usage_by
from billing.budgets import list_budgets
from billing.invoices import list_invoices
from billing.tables import metadata
from billing.tables.usage import CACHED_ANSWERS, MEASURES
from billing.wallets import list_wallets
from tests.billing.test_old_data import fill

FIRST = "0004"
JANUARY = datetime(2026, 1, 1, tzinfo=UTC)
WALLET, RULE, ALERT, PERSON, INVOICE = (f"00000000-0000-7000-8000-00000000000{n}" for n in range(5))
_SUMS = [name for name in MEASURES if name not in CACHED_ANSWERS]


def sums(table: str, about: str, values: str, names: list[str] = _SUMS) -> str:
    """An INSERT of a row of sums, of a day that retention has dropped."""
    return (
        f"INSERT INTO {table} (bucket, dropped, currency, model, {about}, {', '.join(names)}) "
        f"SELECT '2026-01-01 00:00Z', '2026-01-01', 'USD', '{len(names)} sums', {values}, "
        f"{', '.join('1' for _ in names)} FROM api_key LIMIT 1"
    )


OWNER = ("org_id, team_id, user_id, key_id", "org_id, team_id, user_id, id")
TAG = ("org_id, name, value", "org_id, 'feature', 'search'")
ANYBODY = "FROM api_key LIMIT 1"

WRITES: dict[str, tuple[str, ...]] = {
    "0004": (
        "INSERT INTO lease (budget_id, starts_at, replica, granted, settled)"
        " SELECT budget_id, starts_at, 'a.1', 5, 1 FROM budget_window",
        "INSERT INTO operation_set_aside (id) VALUES (gen_random_uuid())",
        "INSERT INTO file (id, org_id, key_id, purpose, filename, bytes, expires_at)"
        " SELECT gen_random_uuid(), org_id, id, 'batch', 'lines.jsonl', 3, '2027-01-01 00:00Z' FROM api_key",
        r"INSERT INTO file_chunk (file_id, number, data) SELECT id, 0, '\x7b7d0a' FROM file",
        "INSERT INTO batch (id, org_id, key_id, endpoint, input_file_id, output_seconds, expires_at) SELECT"
        " gen_random_uuid(), org_id, key_id, '/v1/chat/completions', id, 60, '2027-01-01 00:00Z' FROM file",
        "INSERT INTO batch_line (batch_id, number, custom_id, position, length, prompt_tokens)"
        " SELECT id, 1, 'one', 0, 3, 5 FROM batch",
        "INSERT INTO price_version (id, book, model, tier, currency, input_fresh)"
        " VALUES (gen_random_uuid(), 'sale', 'tiny', 'batch', 'USD', 5)",
    ),
    "0005": (
        "INSERT INTO price_version (id, book, model, tier, scope_kind, scope_id, currency, factor, source)"
        " SELECT gen_random_uuid(), 'sale', '', '', 'org', id::text, 'USD', 0.9, 'operator' FROM org",
        "INSERT INTO attempt (operation_id, number, upstream, model, started_at, status, input_fresh, input_cached,"
        " input_cache_write, output_text, output_reasoning, usage_source, total_seconds, tier, images, billable)"
        " SELECT id, 2, 'hosted', 'big', started_at, 'ok', 1, 0, 3, 0, 2, 'upstream', 1, 'batch', 4, false"
        " FROM operation LIMIT 1",
        "INSERT INTO adjustment (id, operation_id, number, started_at, currency, billed_delta, reason, actor)"
        " SELECT gen_random_uuid(), id, 1, started_at, 'USD', 0.001, 'too low', 'ada' FROM operation LIMIT 1",
        "INSERT INTO device_hour VALUES ('engine', '2026-01-01 00:00Z', 'USD', 3600, 600, 3000, 0.1, 0.5)",
        "INSERT INTO device_account (instance, upstream, wall_seconds, idle_seconds) VALUES ('i', 'engine', 9.5, 1)",
    ),
    "0006": (
        f"INSERT INTO api_key (id, org_id, name, prefix, record_payloads)"
        f" SELECT gen_random_uuid(), org_id, 'recorded', 'fk-r', true {ANYBODY}",
        "INSERT INTO payload (operation_id, request, request_bytes, answer, answer_bytes)"
        r" SELECT id, '\x7b7d', 2, '\x', 900 FROM operation LIMIT 1",
        sums("usage_hour", *OWNER),
        sums("usage_day", *OWNER),
        sums("usage_hour_tag", *TAG),
        sums("usage_day_tag", *TAG),
    ),
    "0007": (
        "INSERT INTO replica (name) VALUES ('b.1')",
        'INSERT INTO budget (id, scope_kind, scope_id, also, "window", limit_amount, currency, rolls_since,'
        " rollover_cap) SELECT gen_random_uuid(), 'key', id::text, '{\"model\": \"tiny\"}', 'month', 10, 'USD',"
        f" '2026-01-01 00:00Z', 5 {ANYBODY}",
        'INSERT INTO budget (id, scope_kind, scope_id, "window", limit_amount, currency, prepaid)'
        f" SELECT '{WALLET}', 'org', id::text, 'none', 0, 'USD', true FROM org",
        f"INSERT INTO budget_window (budget_id, starts_at, added) VALUES ('{WALLET}', '1970-01-01 00:00Z', 20)",
        "INSERT INTO wallet_credit (id, wallet_id, rest, expires_at)"
        f" VALUES (gen_random_uuid(), '{WALLET}', 20, '2027-01-01 00:00Z')",
        "INSERT INTO wallet_entry (id, wallet_id, kind, amount, note, actor)"
        f" VALUES (gen_random_uuid(), '{WALLET}', 'top_up', 20, 'wire', 'ada')",
    ),
    "0008": (
        f"INSERT INTO alert_rule (id, kind, scope_kind, scope_id) VALUES ('{RULE}', 'spike', 'model', '*')",
        "INSERT INTO alert_channel (name, kind, address) VALUES ('ops', 'slack', 'env:SLACK_URL')",
        "INSERT INTO alert_silence (id, rule_id, until, reason)"
        f" VALUES (gen_random_uuid(), '{RULE}', '2027-01-01 00:00Z', 'known')",
        "INSERT INTO alert (id, rule_id, kind, scope_kind, scope_id, subject, level, summary, details, opened_at,"
        f" updated_at) VALUES ('{ALERT}', '{RULE}', 'spike', 'model', 'tiny', 'USD', 0, 'much', '{{}}', now(), now())",
        "INSERT INTO alert_delivery (id, alert_id, channel, message)"
        f" VALUES (gen_random_uuid(), '{ALERT}', 'ops', '{{}}')",
        "INSERT INTO replica_health (replica, spooled, free_bytes) VALUES ('b.1', 3, 1000)",
    ),
    "0009": (
        f"INSERT INTO administrator (id, name, email, role) VALUES ('{PERSON}', 'Ada', 'ada@example.com', 'owner')",
        "INSERT INTO admin_token (id, administrator_id, name, prefix, hash, role)"
        rf" VALUES (gen_random_uuid(), '{PERSON}', 'ci', 'fa-c', '\x01', 'admin')",
        r"INSERT INTO idempotent_write (key_hash, request_hash, expires_at) VALUES ('\x02', '\x03', now())",
    ),
    "0010": (
        "INSERT INTO invoice (id, org_id, number, label, month, time_zone, starts_at, ends_at, currency, customer,"
        f" issuer, bill_to, exact_total, total, unknown) SELECT '{INVOICE}', id, 1, 'A-0001', '2026-01', 'UTC',"
        " '2026-01-01 00:00Z', '2026-02-01 00:00Z', 'USD', name, 'We', 'They', 1.004, 1.00, 2 FROM org",
        "INSERT INTO invoice_line (invoice_id, number, month, model, tier, part, description, quantity, unit, per,"
        f" exact_amount, amount) VALUES ('{INVOICE}', 1, '2026-01', 'tiny', 'standard', 'input_fresh', 'Input', 1,"
        " 'tokens', 1000000, 1.004, 1.00)",
    ),
    "0011": (
        "INSERT INTO administrator (id, name, issuer, subject, role, role_claimed)"
        " VALUES (gen_random_uuid(), 'Bo', 'https://login.example.com', 'bo-1', 'admin', true)",
    ),
    "0012": (f"UPDATE budget SET closed_at = now() WHERE id = '{WALLET}'",),
    "0013": (
        "INSERT INTO price_version (id, book, model, currency, input_fresh, per_cached_answer)"
        " VALUES (gen_random_uuid(), 'sale', 'large', 'USD', 5, 0.01)",
        "INSERT INTO operation (id, started_at, org_id, key_id, api, requested_model, stream, status, http_status,"
        " total_seconds, currency, cached_from, saved_prompt_tokens, saved_completion_tokens, saved_billed)"
        " SELECT gen_random_uuid(), started_at, org_id, key_id, api, 'tiny', false, 'ok', 200, 1, 'USD', id, 7, 8, 1.5"
        " FROM operation LIMIT 1",
        sums("usage_hour", *OWNER, [*MEASURES]),
        sums("usage_day_tag", *TAG, [*MEASURES]),
    ),
    "0015": ("INSERT INTO usage_dropped (day) VALUES ('2026-01-01')",),
}

Rows = dict[str, list[dict[str, object]]]


async def rows(engine: AsyncEngine) -> Rows:
    """All there is, of the tables that are there."""
    found: Rows = {}
    async with engine.connect() as conn:
        for table in metadata.tables:
            if (await conn.execute(text(f"SELECT to_regclass('{table}')"))).scalar_one() is not None:
                found[table] = list((await conn.execute(text(f"SELECT to_jsonb(t) FROM {table} t"))).scalars())
    await engine.dispose()
    return found


def missing(before: Rows, after: Rows) -> dict[str, Counter[str]]:
    """Rows of `before` that are not in `after`, by what columns they have in common; of tables that are in both."""
    lost: dict[str, Counter[str]] = {}
    for table in before.keys() & after.keys():
        if before[table]:
            common = before[table][0].keys() & after[table][0].keys() if after[table] else before[table][0].keys()
            was, now = (
                Counter(json.dumps({name: row[name] for name in sorted(common)}) for row in side[table])
                for side in (before, after)
            )
            if was - now:
                lost[table] = was - now
    return lost


async def test_rows_of_every_release_are_left_as_they_were(database_url: str, engine: AsyncEngine) -> None:
    await asyncio.to_thread(migrations.downgrade, database_url, "base")
    await migrations._migrate(database_url, "upgrade", FIRST)
    await fill(engine, FIRST)
    scripts = ScriptDirectory.from_config(migrations.config())
    releases = [script.revision for script in scripts.iterate_revisions("head", FIRST)]
    for release in [FIRST, *reversed(releases)]:
        before = await rows(engine)
        await migrations._migrate(database_url, "upgrade", release)
        assert missing(before, await rows(engine)) == {}, f"{release} has changed rows"
        async with engine.begin() as conn:
            for statement in WRITES.get(release, ()):
                assert (await conn.execute(text(statement))).rowcount > 0, statement
    filled = await rows(engine)
    assert {table for table, found in filled.items() if not found} == set(), "write rows of it"
    await read(engine)
    await asyncio.to_thread(migrations.downgrade, database_url, "-1")
    lower = await rows(engine)
    assert missing(filled, lower) == {}
    await asyncio.to_thread(migrations.upgrade, database_url)
    assert missing(lower, await rows(engine)) == {}
    await read(engine)


async def read(engine: AsyncEngine) -> None:
    """As this version does."""
    async with engine.connect() as conn:
        assert len(await list_administrators(conn)) == 2
        assert [wallet.balance for wallet in await list_wallets(conn)] == [20]
        assert {budget.rollover for budget in await list_budgets(conn)} == {True, False}
        assert [(each.label, each.total) for each in await list_invoices(conn)] == [("A-0001", Decimal(1))]
        assert "spike" in {rule.kind for rule in await list_rules(conn)}
        assert [(alert.kind, alert.level) for alert in await list_alerts(conn)] == [("spike", 0)]
        assert [channel.name for channel in await list_channels(conn)] == ["ops"]
        priced = (await prices.load(conn)).sale("large")
        assert priced is not None and priced.per_cached_answer == Decimal("0.01")
        found = await usage_by(conn, ["model"], JANUARY, JANUARY + timedelta(hours=1))
        assert [(row.operations, row.billed) for row in found] == [(1, Decimal(2))] * 2, "adjustments counted in"
    await engine.dispose()
