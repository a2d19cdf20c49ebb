"""How long a gateway waits while the schema under it is brought from an early release's to this one's.

`python -m benchmarks.migrations [--rows N] [--from REVISION] [--folder DIR] [--json FILE]`. A ledger of N operations
with their attempts is laid at the early schema. Then, while operations are recorded at RATE a second, the
migrations run as they do in `farthing migrate`, and once more while a report holds the ledger's tables.
"""

import argparse
import asyncio
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import migrations
from benchmarks.billing import FILLED
from benchmarks.report import Report, Row
from billing.ids import new_id
from billing.partitions import ensure_partition
from gateway.postgres import embedded_postgres

PACKAGES = ("farthing", "alembic", "sqlalchemy", "asyncpg")
RATE = 200
DAYS = 31
CHUNK = 250_000
CALM_SECONDS = 5.0
REPORT_SECONDS = 5.0
MOST_MS = 1000.0
"""Twice what a migration waits for one lock. Calls are spooled meanwhile and do not wait."""

_MADE = """
    WITH made AS (
        INSERT INTO operation (
            id, started_at, org_id, key_id, tags, api, requested_model, model, stream, status, http_status,
            total_seconds, billed, cost, currency
        )
        SELECT uuidv7(at - clock_timestamp()), at, :org, :org, '{"feature": "a"}', 'chat.completions', 'auto', 'small',
            true, 'ok', 200, 1, 0.001, 0.0004, 'USD'
        FROM (
            SELECT CAST(:day AS timestamptz) + random() * interval '1 day' AS at FROM generate_series(1, :rows)
        ) AS moments
        RETURNING id, started_at, model, billed, cost
    )
    INSERT INTO attempt (
        operation_id, number, upstream, model, started_at, status, http_status, input_fresh, input_cached,
        input_cache_write, output_text, output_reasoning, usage_source, total_seconds, billed, cost
    )
    SELECT id, 1, 'engine', model, started_at, 'ok', 200, 200, 160, 0, 150, 0, 'engine', 1, billed, cost FROM made
"""


_IDS = "FROM unnest(CAST(:ids AS uuid[])) AS id"
_RECORD = (
    f"""
    INSERT INTO operation (
        id, started_at, org_id, key_id, api, requested_model, model, stream, status, http_status, total_seconds,
        currency
    )
    SELECT id, now(), :org, :org, 'chat.completions', 'auto', 'small', true, 'ok', 200, 1, 'USD' {_IDS}
    """,
    f"""
    INSERT INTO attempt (
        operation_id, number, upstream, model, started_at, status, http_status, input_fresh, input_cached,
        input_cache_write, output_text, output_reasoning, usage_source, total_seconds
    )
    SELECT id, 1, 'engine', 'small', now(), 'ok', 200, 200, 160, 0, 150, 0, 'engine', 1 {_IDS}
    """,
)
_ORG = new_id()


async def fill(engine: AsyncEngine, rows: int) -> None:
    """With what every release's schema has."""
    began = time.perf_counter()
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    days = [today - timedelta(days=number) for number in range(DAYS)]
    async with engine.begin() as connection:
        for day in days:
            for table in ("operation", "attempt"):
                await ensure_partition(connection, table, day.date())
    left = rows
    for number, day in enumerate(days):
        share = left // (DAYS - number)
        left -= share
        for start in range(0, share, CHUNK):
            async with engine.begin() as connection:
                values = {"day": day, "rows": min(CHUNK, share - start), "org": _ORG}
                await connection.execute(text(_MADE), values)
    say(f"  {time.perf_counter() - began:.0f} s")
    async with engine.connect() as connection:
        await (await connection.execution_options(isolation_level="AUTOCOMMIT")).execute(text("VACUUM ANALYZE"))


class Writer:
    """Records operations as the ledger does: all that have come since, RATE a second, in one transaction.

    `waits` has how long the first of each batch waited to be committed, in ms.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.waits: list[float] = []

    async def _write(self) -> None:
        due = time.perf_counter()
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            number = 1 + int((time.perf_counter() - due) * RATE)
            values = {"ids": [new_id() for _ in range(number)], "org": _ORG}
            async with self._engine.begin() as connection:
                for statement in _RECORD:
                    await connection.execute(text(statement), values if "org" in statement else {"ids": values["ids"]})
            self.waits.append((time.perf_counter() - due) * 1000)
            due += number / RATE

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        self.waits = []
        task = asyncio.create_task(self._write())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Steps(logging.Handler):
    """Of each migration that Alembic says it runs, the seconds until the next one, or the end."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._began: list[tuple[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("Running"):
            step = record.getMessage().removeprefix("Running ").partition(",")[0]  # like: upgrade 0004 -> 0005
            self._began.append((step, time.perf_counter()))

    def __enter__(self) -> "Steps":
        self._began = []
        log = logging.getLogger("alembic.runtime.migration")
        log.setLevel(logging.INFO)
        log.addHandler(self)
        return self

    def __exit__(self, *unused: object) -> None:
        logging.getLogger("alembic.runtime.migration").removeHandler(self)
        self._began.append(("", time.perf_counter()))

    @property
    def seconds(self) -> dict[str, float]:
        return {name: end - start for (name, start), (_, end) in itertools.pairwise(self._began)}


async def measure(chosen: argparse.Namespace, folder: Path) -> Report:
    report = Report()
    with embedded_postgres(folder / "postgres", FILLED) as url:
        await asyncio.to_thread(migrations.upgrade, url, chosen.start)
        engine = create_async_engine(url)
        try:
            say(f"{chosen.rows:,} operations with their attempts, at schema {chosen.start}")
            await fill(engine, chosen.rows)
            await _all_ways(report, url, engine, chosen.start)
        finally:
            await engine.dispose()
    worst = max((row for row in report.rows if row.metric == "longest wait"), key=lambda row: row.value)
    report.ratios["longest_wait_ms"], report.targets["longest_wait_ms"] = worst.value, f"<{MOST_MS:g}"
    report.basis["longest_wait_ms"] = f"{worst.workload}: {worst.metric}"
    return report


async def _all_ways(report: Report, url: str, engine: AsyncEngine, start: str) -> None:
    writer = Writer(engine)
    async with writer.writing():
        await asyncio.sleep(CALM_SECONDS)
    _add(report, "nothing else", {"longest wait": max(writer.waits)})

    async def run(name: str, migrate: Callable[..., None], *revision: str) -> None:
        async with writer.writing():
            await asyncio.sleep(1)
            with Steps() as steps:
                began = time.perf_counter()
                await asyncio.to_thread(migrate, url, *revision)
                took = time.perf_counter() - began
            await asyncio.sleep(1)
        found = {"longest wait": max(writer.waits), "all": took * 1000}
        _add(report, name, found | {step: seconds * 1000 for step, seconds in steps.seconds.items()})

    await run(f"up from {start}", migrations.upgrade)
    await run("down one", migrations.downgrade, "-1")
    await run("up one", migrations.upgrade)
    await asyncio.to_thread(migrations.downgrade, url, start)
    async with _a_report(engine):
        await run(f"up from {start} during a report of {REPORT_SECONDS:g} s", migrations.upgrade)


@asynccontextmanager
async def _a_report(engine: AsyncEngine) -> AsyncIterator[None]:
    """That reads the ledger's tables, and keeps them from being altered."""

    async def read() -> None:
        async with engine.begin() as connection:
            await connection.execute(text("SELECT 1 FROM operation, attempt LIMIT 1"))
            reading.set()
            await asyncio.sleep(REPORT_SECONDS)

    reading = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        await reading.wait()
        yield


def _add(report: Report, workload: str, found: dict[str, float]) -> None:
    for metric, value in found.items():
        say(f"  {workload}: {metric} {value:,.1f} ms")
        report.rows.append(Row.of(workload, "farthing", metric, [value], "ms"))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.migrations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rows", type=int, default=10_000_000, help="operations in the ledger, each with an attempt")
    parser.add_argument("--quick", dest="rows", action="store_const", const=20_000, help="20,000 operations")
    parser.add_argument("--from", dest="start", default="0004", metavar="REVISION", help="the schema to begin with")
    parser.add_argument("--folder", type=Path, help="where the database is made (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there instead of printing them")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="farthing-migrations-", dir=chosen.folder) as folder:
        report = asyncio.run(measure(chosen, Path(folder)))
    live = f"{RATE} more a second while the schema changes"
    report.notes.insert(0, f"migrations: {chosen.rows:,} operations, {live}; how long one waits to be recorded")
    report.emit(chosen.json, PACKAGES)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
