"""`farthing ledger …` and keys that record payloads, as an operator sees them."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from billing.partitions import ensure_partition, ensure_partitions
from tests.gateway.commands import farthing_inside


@pytest.fixture
def run(database_url: str) -> Any:
    return lambda *arguments: farthing_inside(*arguments, FARTHING_DATABASE_URL=database_url)


async def test_partitions_are_listed_and_what_would_go_is_told(run: Any, database_url: str) -> None:
    today = datetime.now(UTC).date()
    old = today - timedelta(days=20)
    engine = create_async_engine(database_url)
    async with engine.begin() as conn:
        await ensure_partitions(conn, 1)
        for table in ("operation", "attempt"):
            await ensure_partition(conn, table, old)
    await engine.dispose()
    listed = json.loads(run("ledger", "size", "--json").stdout)
    names = [row["partition"] for row in listed]
    oldest = [f"attempt_{old:%Y%m%d}", f"operation_{old:%Y%m%d}"]
    assert [name for name in names if name.endswith(f"{old:%Y%m%d}")] == oldest
    assert f"usage_hour_{today:%Y%m}" in names and "payload_default" in names
    assert all(float(row["mib"]) >= 0 for row in listed)
    gone = json.loads(run("ledger", "retention", "--operations", "19", "--json").stdout)
    assert [row["partition"] for row in gone] == oldest
    assert run("ledger", "retention", "--operations", "20").stdout == "none\n"
    assert [row["partition"] for row in json.loads(run("ledger", "size", "--json").stdout)] == names
    nothing = run("ledger", "retention")
    assert nothing.returncode == 1 and "say for how many days" in nothing.stderr
    wrong = run("ledger", "retention", "--rollups", "5")
    assert wrong.returncode == 1 and "at least as long" in wrong.stderr


def test_a_key_records_payloads_only_when_told_to(run: Any) -> None:
    [key] = json.loads(run("keys", "create", "k", "--json").stdout)
    for option, shown in ((None, "no"), ("--record-payloads", "yes"), ("--no-record-payloads", "no")):
        if option is not None:
            assert run("keys", "restrict", key["id"], option).returncode == 0
        [found] = json.loads(run("keys", "show", key["id"], "--json").stdout)
        assert found["record_payloads"] == shown
