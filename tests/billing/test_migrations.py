"""The migrations against a real PostgreSQL: they make the tables of billing, take turns, and fail with a sentence."""

import asyncio
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import CheckConstraint, Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncEngine

import migrations
from billing import people
from billing.partitions import ensure_partitions, is_partition
from billing.tables import metadata


def differences(connection: Connection) -> list[object]:
    def ours(name: str | None, kind: str, parents: object) -> bool:
        return not (kind == "table" and name is not None and is_partition(name))

    options = {"include_name": ours, "compare_server_default": True, "target_metadata": metadata}
    found: list[object] = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
    return found


async def test_the_migrated_schema_is_the_one_in_tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await ensure_partitions(connection, 1)
        assert await connection.run_sync(differences) == []
        await connection.execute(text("ALTER TABLE attempt DROP COLUMN error"))
        assert len(await connection.run_sync(differences)) == 1  # so the comparison does look at partitioned tables


async def test_every_check_constraint_is_there(engine: AsyncEngine) -> None:
    """Alembic does not compare check constraints, so their names are compared here."""

    def names(connection: Connection) -> dict[str, set[str | None]]:
        looking = inspect(connection)
        return {table: {check["name"] for check in looking.get_check_constraints(table)} for table in metadata.tables}

    full_name = engine.dialect.identifier_preparer.format_constraint
    wanted = {
        name: {full_name(check) for check in table.constraints if isinstance(check, CheckConstraint)}
        for name, table in metadata.tables.items()
    }
    assert wanted["lease"] == {"ck_lease_settled_not_negative", "ck_lease_settled_was_granted"}
    async with engine.connect() as connection:
        assert await connection.run_sync(names) == wanted


async def test_down_to_nothing_and_up_again(database_url: str, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await ensure_partitions(connection, 1)
    await asyncio.to_thread(migrations.downgrade, database_url, "base")
    async with engine.connect() as connection:
        assert await connection.run_sync(lambda c: inspect(c).get_table_names()) == ["alembic_version"]
    await asyncio.to_thread(migrations.upgrade, database_url)
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []


async def test_keys_outlive_a_way_down_and_up(database_url: str, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        org = await people.create_org(connection, "acme")
        old = await people.create_key(connection, org, "k")
        new = await people.rotate_key(connection, old.id, timedelta(days=1))
    assert new is not None
    await asyncio.to_thread(migrations.downgrade, database_url, "0001")
    await asyncio.to_thread(migrations.upgrade, database_url)
    async with engine.connect() as connection:
        found = await people.find_key(connection, new.secret)
        assert found is not None and found.key_id == old.id and found.ended() is None
        assert await people.find_key(connection, old.secret) is None, "the schema before had room for one"


async def test_two_starters_take_turns(database_url: str) -> None:
    await asyncio.to_thread(migrations.downgrade, database_url, "base")
    await asyncio.gather(*(asyncio.to_thread(migrations.upgrade, database_url) for _ in range(4)))


async def test_a_newer_database_is_refused(database_url: str, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(migrations.MigrationError, match=r"newer Farthing \(schema 9999 is unknown here\)"):
        await asyncio.to_thread(migrations.upgrade, database_url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://farthing:hunter2secret@127.0.0.1:1/nowhere",
        "postgresql+asyncpg://postgres@/postgres?host=/nowhere/at/all",
        "not a url",
    ],
)
def test_an_unreachable_database_is_one_sentence_without_the_password(url: str) -> None:
    with pytest.raises(migrations.MigrationError, match="could not migrate the database") as caught:
        migrations.upgrade(url)
    assert "hunter2secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_it_runs_from_an_installed_copy(database_url: str, tmp_path: Path) -> None:
    """What a wheel unpacks, elsewhere, with no checkout in reach."""
    root = Path(migrations.__file__).parent.parent
    for package in ("billing", "migrations"):
        shutil.copytree(root / package, tmp_path / package)
    await asyncio.to_thread(migrations.downgrade, database_url, "base")
    program = "import migrations; print(migrations.__file__); migrations.upgrade(sys.argv[1])"
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}", database_url],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
