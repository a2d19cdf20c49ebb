"""The embedded PostgreSQL: starts, restarts at the same address, survives a crash, says why it cannot start."""

import os
import signal
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.connect import asyncpg_url, libpq_url, transaction
from gateway.postgres import EmbeddedPostgres, PostgresFailedError
from gateway.processes import Child


async def test_data_and_address_survive_a_stop_and_a_crash(tmp_path: Path) -> None:
    # Longer than a Unix socket's name may be (107 bytes): the data folder is the user's choice.
    folder = tmp_path / ("long" * 20) / ("long" * 20)
    server = EmbeddedPostgres(folder, {"application_name": "from_settings"})
    try:
        server.start()
        url = asyncpg_url(server.url)
        async with transaction(url) as connection:
            await connection.execute(text("CREATE TABLE kept AS SELECT 1 AS n"))
            assert (await connection.execute(text("SHOW server_version_num"))).scalar_one().startswith("18")
            await connection.execute(text("CREATE EXTENSION vector"))
        server.stop()
        assert server.exit_code() == 0
        server.start()
        async with transaction(url) as connection:
            assert (await connection.execute(text("SELECT n FROM kept"))).scalar_one() == 1
        os.kill(int((folder / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
        server.stop()
        server.start()
        async with transaction(url) as connection:
            assert (await connection.execute(text("SELECT n FROM kept"))).scalar_one() == 1
    finally:
        server.stop()


def test_the_socket_folder_of_a_killed_run_is_removed_by_the_next(tmp_path: Path) -> None:
    killed, after = EmbeddedPostgres(tmp_path / "data"), EmbeddedPostgres(tmp_path / "data")
    left, used = (Path(server.url.partition("host=")[2]) for server in (killed, after))
    try:
        killed.start()
        Child.stop(killed)  # what the kernel does for a supervisor that was killed: PostgreSQL stops, nobody tidies up
        assert left.is_dir()
        after.start()
        assert not left.exists() and used.is_dir()
    finally:
        killed.stop()
        after.stop()
    assert not used.exists()


def test_half_a_data_folder_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "data.new").mkdir()
    (tmp_path / "data.new" / "PG_VERSION").write_text("18\n")  # initdb writes this first
    server = EmbeddedPostgres(tmp_path / "data")
    try:
        server.start()
        assert [path.name for path in tmp_path.iterdir()] == ["data"]
    finally:
        server.stop()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "data", {"shared_buffers": "nonsense"})
    with pytest.raises(PostgresFailedError, match=r"invalid value for parameter .shared_buffers"):
        server.start()


def test_addresses_as_people_write_them() -> None:
    hosted = "postgres://me:p%40ss@db.example.com/app?sslmode=require"
    url = asyncpg_url(hosted)
    assert url.drivername == "postgresql+asyncpg" and url.query == {"ssl": "require"} and url.password == "p@ss"
    assert libpq_url(url) == "postgresql://me:p%40ss@db.example.com/app?sslmode=require"
    assert asyncpg_url(libpq_url(url)) == url
