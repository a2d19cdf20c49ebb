"""A ledger of millions of operations over 31 days, made in SQL, and how long the dashboard's questions take on it."""

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import operations, people, reports
from billing.devices import device_hours
from billing.explanation import explain
from billing.forecast import forecast_month
from billing.partitions import BY_DAY, ensure_partition
from billing.rollups import refresh
from billing.tables import operation
from dashboards.web import usage
from dashboards.web.overview import PERIODS, start_of

DAYS = 31
USERS = 200
CHUNK = 250_000
REPEATS = 5

Figures = dict[str, tuple[list[float], str]]
Say = Callable[[str], None]

# uuidv7(interval) is PostgreSQL 18's: an id as of another time. Three quarters of the rows fall into half the day.
_FILL = text("""
    WITH made AS (
        SELECT uuidv7(at - clock_timestamp()) AS id, at, random() AS luck, random() AS more,
               1 + (random() * random() * (:users - 1))::int AS who
        FROM (
            SELECT CAST(:day AS timestamptz) + make_interval(secs => 86399 * CASE
                WHEN random() < 0.75 THEN 0.3 + 0.5 * random() ELSE random() END) AS at
            FROM generate_series(1, :rows)
        ) AS moments
    ), operations AS (
        INSERT INTO operation (
            id, started_at, org_id, team_id, user_id, key_id, tags, api, requested_model, model, route_reasons,
            route_score, stream, status, http_status, finish_reason, ttft_seconds, total_seconds, billed, cost, currency
        )
        SELECT m.id, m.at, m_user.org_id, NULL, m_user.id, key.id,
               jsonb_build_object('feature', 'feature-' || (20 * more)::int), 'chat.completions', 'auto',
               CASE WHEN luck < 0.6 THEN 'small' WHEN luck < 0.95 THEN 'large' ELSE 'hosted' END, '{"short prompt"}',
               luck, more < 0.7, CASE WHEN more < 0.97 THEN 'ok' ELSE 'client_closed' END, 200, 'stop', 0.2 * luck,
               2 * luck, (0.01 * luck)::numeric(12, 9), (0.004 * luck)::numeric(12, 9), 'USD'
        FROM made m
        JOIN members m_user ON m_user.number = m.who JOIN api_key key ON key.user_id = m_user.id
        RETURNING id, started_at, model, billed, cost
    )
    INSERT INTO attempt (
        operation_id, number, upstream, model, started_at, status, http_status, input_fresh, input_cached,
        input_cache_write, output_text, output_reasoning, usage_source, ttft_seconds, total_seconds, billed, cost
    )
    SELECT id, 1, 'engine', model, started_at, 'ok', 200, 200, 16 * (random() * 30)::int, 0, 150, 0, 'engine', 0.1, 1,
           billed, cost
    FROM operations
""")


_TWO_USERS = text("""
    SELECT org_id, (SELECT id FROM app_user WHERE name = 'quiet'), (SELECT id FROM members WHERE number = 1)
    FROM app_user WHERE name = 'quiet'
""")


async def fill(engine: AsyncEngine, rows: int, say: Say) -> Figures:
    """So many operations with an attempt each, spread over the days until now; then their rollups."""
    began = time.perf_counter()
    await _people(engine)
    now = datetime.now(UTC)
    days = [now - timedelta(days=n + 1) for n in range(DAYS)]
    async with engine.begin() as conn:
        for day in (now, *days):
            for table in BY_DAY:
                await ensure_partition(conn, table, day.date())
    left = rows
    for number, day in enumerate(days):
        share = left // (DAYS - number)
        left -= share
        for start in range(0, share, CHUNK):
            async with engine.begin() as conn:
                values = {"day": day, "rows": min(CHUNK, share - start), "users": USERS}
                await conn.execute(_FILL, values)
        say(f"  {rows - left:,} rows, {time.perf_counter() - began:.0f} s")
    filled = time.perf_counter() - began
    async with engine.connect() as conn:
        await (await conn.execution_options(isolation_level="AUTOCOMMIT")).execute(text("VACUUM ANALYZE"))
    began = time.perf_counter()
    await refresh(engine)
    summed = time.perf_counter() - began
    async with engine.connect() as conn:
        await (await conn.execution_options(isolation_level="AUTOCOMMIT")).execute(text("VACUUM ANALYZE"))
        size = (await conn.execute(text("SELECT pg_database_size(current_database())"))).scalar_one()
    return {
        "filled": ([rows / filled], "operations/s"),
        "summed up": ([rows / summed], "operations/s"),
        "database": ([size / 2**30], "GiB"),
    }


async def _people(engine: AsyncEngine) -> None:
    async with engine.begin() as conn:
        org_id = await people.create_org(conn, "Large")
        for number in range(USERS):
            user_id = await people.create_user(conn, org_id, f"user {number}")
            for name in ("laptop", "server"):
                await people.create_key(conn, org_id, name, user_id=user_id)
        await conn.execute(
            text("CREATE TABLE members AS SELECT id, org_id, row_number() OVER (ORDER BY id) AS number FROM app_user")
        )
        await people.create_user(conn, org_id, "quiet")
        # One key each in the rows: the second ones are there for the list of keys.
        await conn.execute(text("UPDATE api_key SET user_id = NULL WHERE name = 'server'"))


async def questions(engine: AsyncEngine, say: Say) -> Figures:
    """Each question of the dashboard with its own arguments, while the running hour is not summed up."""
    await _mark_the_running_hour(engine)
    now = datetime.now(UTC)
    found: Figures = {}
    for name, ask in (await _asked(engine, now)).items():
        times = []
        for _ in range(REPEATS):
            async with engine.connect() as conn:
                await conn.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
                began = time.perf_counter()
                await ask(conn)
                times.append((time.perf_counter() - began) * 1000)
        found[f"asked: {name}"] = (times, "ms")
    return found


async def _asked(engine: AsyncEngine, now: datetime) -> dict[str, Callable[[AsyncConnection], Awaitable[Any]]]:
    starts = [start_of(period, now) for period in PERIODS]
    half = select(operation.c.id).where(operation.c.started_at < now - timedelta(days=DAYS / 2))
    async with engine.connect() as conn:
        some = (await conn.execute(half.order_by(operation.c.started_at.desc()).limit(1))).scalar_one()
        org_id, quiet, busy = (await conn.execute(_TWO_USERS)).one()
    asked: dict[str, Callable[[AsyncConnection], Awaitable[Any]]] = {
        "latest 10": partial(operations.latest_operations, limit=10),
        "latest 100": partial(operations.latest_operations, limit=100),
        "100 older ones": partial(operations.operations_before, cursor=some, limit=100),
        "100 newer ones": partial(operations.operations_after, cursor=some, limit=100),
        "one operation": partial(operations.find_operation, operation_id=some),
        "one operation explained": partial(explain, operation_id=some),
        "totals of all periods": partial(reports.total_spending, starts=starts),
        "users": partial(reports.user_spending, starts=starts),
        "the month's forecast": forecast_month,
        "devices, 30d": partial(device_hours, start=starts[-1], end=now),
    }
    for who, user_id in (("a busy user", busy), ("a user without operations", quiet)):
        within = reports.Within(org_id=org_id, user_id=user_id)
        asked |= {
            f"latest 100 of {who}": partial(operations.latest_operations, limit=100, within=within),
            f"totals of {who}": partial(reports.total_spending, starts=starts, within=within),
            f"usage of {who} by key, 30d": partial(usage.gather, by="key", period=PERIODS[-1], now=now, within=within),
        }
    for name in (*usage.NAMES, "tag:feature"):
        period = PERIODS[0] if name == "hour" else PERIODS[-1]
        asked[f"usage by {name}, {period.slug}"] = partial(
            usage.gather, by=name, period=period, now=now, within=reports.EVERYTHING
        )
    for period, start in zip(PERIODS, starts, strict=True):
        asked |= {
            f"spending, {period.slug}": partial(reports.spending_over_time, start=start, step=period.step),
            f"tokens, {period.slug}": partial(reports.tokens_over_time, start=start, step=period.step),
            f"models, {period.slug}": partial(reports.model_shares, start=start),
            f"cache, {period.slug}": partial(reports.cache_savings, start=start),
        }
    return asked


async def _mark_the_running_hour(engine: AsyncEngine) -> None:
    """As its next operation does: it is read from the ledger."""
    async with engine.begin() as conn:
        await conn.execute(text("INSERT INTO usage_stale (bucket) VALUES (date_trunc('hour', now(), 'UTC'))"))
