"""What reads the ledger's rows says which days retention has dropped; what reads the sums has them for longer."""

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


async def drop(engine: AsyncEngine, rollups: int | None = None) -> list[date]:
    """The days that went, of an installation that keeps operations for 60 days."""
    await refresh(engine)
    names = await enforce(engine, Keep(operations=KEPT, rollups=rollups))
    return sorted(datetime.strptime(name[-8:], "%Y%m%d").date() for name in names if name.startswith("operation"))


@pytest.fixture
def run(database_url: str) -> Run:
    at = datetime.combine(SPENT, datetime.min.time(), UTC)
    in_database(database_url, lambda connection: sample_ledger.fill(connection, at, operations=300))
    return shell(database_url)


def dropped(database_url: str, rollups: int | None = None) -> list[date]:
    async def work() -> list[date]:
        engine = create_async_engine(database_url)
        try:
            return await drop(engine, rollups)
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


def test_usage_says_which_sums_it_lacks(database_url: str, tmp_path: Path) -> None:
    at = datetime.combine(TODAY - timedelta(days=300), datetime.min.time(), UTC)
    in_database(database_url, lambda connection: sample_ledger.fill(connection, at, operations=20, days=3))
    period = ["--from", str(at.date() - timedelta(days=9)), "--to", str(TODAY)]
    run = shell(database_url)
    days = dropped(database_url)
    assert len(days) in (3, 4)
    said = f"retention has dropped {len(days)} days from {days[0]} to {days[-1]} from the ledger: what was called then"
    assert said not in run("usage", *period).stderr, "the sums are there"
    assert said in run("usage", "--by", "user,tag:feature", *period).stderr, "of these there are none"
    assert dropped(database_url, rollups=200) == []
    out = tmp_path / "usage.csv"
    for arguments in (["usage"], ["usage", "--by", "model", "--json"], ["export", "usage", "-o", out], ["margins"]):
        found = run(*arguments, *period)
        assert f"farthing: {said} is not in this; what it came to is dropped too" in found.stderr, arguments
        assert found.exit_code == 0


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
        lost = {"days": len(days), "first": str(days[0]), "last": str(days[-1])}
        assert report["gap"] == lost | {"without_sums": 0}
        assert (await client.get("/usage", params=period | {"by": "user"})).json()["gap"] is None
        of_rows = (await client.get("/usage", params=period | {"by": ["user", "tag:feature"]})).json()
        assert of_rows["gap"] == report["gap"]
    await engine.dispose()
