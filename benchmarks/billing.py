"""What billing sustains on one machine with its PostgreSQL: operations a second, the hot path's share, reports.

`python -m benchmarks.billing [--seconds N | --quick] [--rows N] [--folder DIR] [--json FILE]`. Operations are admitted
under a budget, spooled (fsync) and settled in one process, as in a gateway (on its event loop, with its settings of the
garbage collector), while its ledger copies them into PostgreSQL (fsync too) on the same cores. With --rows the ledger
is filled with so many operations over 31 days, and each question that the dashboard asks is timed; that needs about
1 KiB of disk for each.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from benchmarks import billing_load, billing_rows
from benchmarks.report import Report, Row
from gateway.memory import collect_seldom
from gateway.postgres import embedded_postgres
from migrations import upgrade

PACKAGES = ("farthing", "sqlalchemy", "asyncpg", "msgspec")
FILLED = {"max_wal_size": "8GB", "synchronous_commit": "off", "shared_buffers": "1GB", "maintenance_work_mem": "512MB"}


@asynccontextmanager
async def database(folder: Path, settings: dict[str, str]) -> AsyncIterator[AsyncEngine]:
    """A migrated PostgreSQL with its data in `folder`."""
    with embedded_postgres(folder, settings) as url:
        await asyncio.to_thread(upgrade, url)
        engine = create_async_engine(url, pool_size=10)
        try:
            yield engine
        finally:
            await engine.dispose()


async def measure(chosen: argparse.Namespace, folder: Path) -> Report:
    report = Report()
    async with database(folder / "postgres", {}) as engine:
        load = billing_load.Load(engine, folder / "spool")
        async with load.running():
            say(f"as many operations as go, for {chosen.seconds:g} s")
            add(report, "as many as go", await load.as_many_as_go(chosen.seconds))
            say(f"{billing_load.RATE:,} operations a second, for {chosen.seconds / 3:g} s")
            add(report, f"{billing_load.RATE:,} a second", await load.paced(chosen.seconds / 3))
        say("COPY beside INSERT")
        add(report, "rows into the ledger", await billing_load.copy_and_insert(engine))
    if chosen.rows:
        async with database(folder / "filled", FILLED) as engine:
            say(f"{chosen.rows:,} operations with their attempts")
            add(report, f"{chosen.rows:,} operations", await billing_rows.fill(engine, chosen.rows, say))
            add(report, f"{chosen.rows:,} operations", await billing_rows.questions(engine, say))
    compare(report)
    return report


def add(report: Report, workload: str, found: dict[str, tuple[list[float], str]]) -> None:
    for metric, (values, unit) in found.items():
        say(f"  {metric}: {max(values):,.3g} {unit}")
        report.rows.append(Row.of(workload, "farthing", metric, values, unit))


def compare(report: Report) -> None:
    figures = {(row.workload, row.metric): row.value for row in report.rows}
    own = {
        "operations_per_s": ("as many as go", "operations into PostgreSQL", ">2000"),
        "hot_path_p99_ms": (f"{billing_load.RATE:,} a second", "hot path p99", "<1"),
        "copy_over_insert": ("rows into the ledger", "COPY over INSERT", ">1"),
    }
    for name, (workload, metric, target) in own.items():
        report.ratios[name], report.targets[name] = figures[workload, metric], target.removeprefix(">")
        report.basis[name] = f"{workload}: {metric}"
    if slowest := [row for row in report.rows if row.metric.startswith("asked: ")]:
        row = max(slowest, key=lambda each: each.value)
        report.ratios["slowest_question_ms"], report.targets["slowest_question_ms"] = row.value, "<300"
        report.basis["slowest_question_ms"] = row.metric


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.billing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long as many operations as go are written")
    parser.add_argument("--rows", type=int, default=0, help="also fill the ledger with so many and time its reports")
    parser.add_argument("--folder", type=Path, help="where the databases are made (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there instead of printing them")
    parser.add_argument("--quick", action="store_true", help="5 seconds instead")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.seconds = 5.0
    collect_seldom()
    with tempfile.TemporaryDirectory(prefix="farthing-billing-", dir=chosen.folder) as folder:
        report = uvloop.run(measure(chosen, Path(folder)))
    report.notes.insert(0, f"billing: spool, ledger and PostgreSQL on one machine, {chosen.seconds:g} s")
    report.emit(chosen.json, PACKAGES)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
