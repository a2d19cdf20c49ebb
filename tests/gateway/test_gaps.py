"""What reads the ledger's rows says which days retention has dropped; what reads the sums still has them."""

import asyncio
import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import sample_ledger
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from test_usage_cli import Run, in_database, shell

from billing.retention import Keep, enforce
from billing.rollups import refresh
from tests.gateway.administering import a_house

TODAY = datetime.now(UTC).date()
SPENT = TODAY - timedelta(days=40)
PERIOD = ["--from", str(SPENT - timedelta(days=60)), "--to", str(TODAY)]
KEPT = 60


async def drop(engine: AsyncEngine) -> list[date]:
    """The days that went, of an installation that keeps operations for 60 days."""
    await refresh(engine)
    names = await enforce(engine, Keep(operations=KEPT))
    return sorted(datetime.strptime(name[-8:], "%Y%m%d").date() for name in names if name.startswith("operation"))


@pytest.fixture
def run(database_url: str) -> Run:
    at = datetime.combine(SPENT, datetime.min.time(), UTC)
    in_database(database_url, lambda connection: sample_ledger.fill(connection, at, operations=300))
    return shell(database_url)


def dropped(database_url: str) -> list[date]:
    async def work() -> list[date]:
        engine = create_async_engine(database_url)
        try:
            return await drop(engine)
        finally:
            await engine.dispose()

    return asyncio.run(work())


def test_files_margins_and_bills_say_what_they_lack(run: Run, database_url: str, tmp_path: Path) -> None:
    out, bill = tmp_path / "usage.parquet", tmp_path / "bill.csv"
    bill.write_text(f"Day,Model,Cost\n{SPENT - timedelta(days=25)},hosted-70b,0.5\n{TODAY},hosted-70b,0\n")
    commands = {
        "export usage": ["export", "usage", "-o", out, *PERIOD],
        "export focus": ["export", "focus", "-o", "-", *PERIOD],
        "margins": ["margins", *PERIOD, "--json"],
        "reconcile": ["reconcile", bill, "--upstream", "hosted", "--columns", "day=Day,model=Model,cost=Cost"],
    }
    before = {name: run(*arguments) for name, arguments in commands.items()}
    billed = json.loads(run("usage", "--by", "org", *PERIOD, "--json").stdout)
    days = dropped(database_url)
    assert len(days) > 5
    for name, arguments in commands.items():
        assert "retention" not in before[name].stderr, name
        found = run(*arguments)
        assert found.exit_code == before[name].exit_code, found.stderr
        first = days[0] if name != "reconcile" else max(days[0], SPENT - timedelta(days=25))
        number = sum(day >= first for day in days)
        assert f"farthing: retention has dropped {number} days from {first} to {days[-1]}" in found.stderr, name
    assert pq.read_schema(out).metadata[b"farthing.lacks"].startswith(b"retention has dropped")
    assert json.loads(run("usage", "--by", "org", *PERIOD, "--json").stdout) == billed
    recent = ["--from", str(days[-1] + timedelta(days=1)), "--to", str(TODAY)]
    assert "retention" not in run("export", "usage", "-o", out, *recent).stderr
    assert b"farthing.lacks" not in (pq.read_schema(out).metadata or {})


async def test_so_does_the_api(database_url: str, tmp_path: Path) -> None:
    engine = create_async_engine(database_url)
    at = datetime.combine(SPENT, datetime.min.time(), UTC)
    async with engine.begin() as conn:
        await sample_ledger.fill(conn, at, operations=60)
    days = await drop(engine)
    house = await a_house(engine, database_url, tmp_path)
    period = {"start": f"{SPENT - timedelta(days=60)}T00:00:00Z", "end": f"{TODAY}T00:00:00Z"}
    async with house.client() as client:
        for path in ("/exports/usage", "/exports/focus"):
            found = await client.get(path, params=period)
            assert found.headers["x-farthing-lacks"].startswith(
                f"retention has dropped {len(days)} days from {days[0]}"
            )
            of_other = await client.get(path, params=period | {"org_id": str(house.org)})
            assert of_other.status_code == 200 and "x-farthing-lacks" not in of_other.headers
        report = (await client.get("/margins", params=period)).json()
        assert report["gap"] == {"days": len(days), "first": str(days[0]), "last": str(days[-1])}
    await engine.dispose()
