"""Day partitions in a real PostgreSQL, and the ids that decide them."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.ids import new_id, smallest_id
from billing.partitions import (
    DAYS_AHEAD,
    ensure_partitions,
    is_partition,
    make_ahead,
    partition_name,
    partitions,
)
from billing.tables import attempt, operation
from tests.billing.samples import KEY, ORG


def time_of(identifier: UUID) -> datetime:
    """When a UUIDv7 was made, to the millisecond, in UTC."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=identifier.int >> 80)


def row(identifier: UUID) -> dict[str, object]:
    return {
        "id": identifier,
        "started_at": datetime.now(UTC),
        "org_id": ORG,
        "key_id": KEY,
        "api": "chat.completions",
        "requested_model": "auto",
        "stream": False,
        "status": "ok",
        "http_status": 200,
        "total_seconds": 1.0,
        "currency": "USD",
    }


async def partition_of(conn: AsyncConnection, identifier: UUID) -> str:
    query = text("SELECT tableoid::regclass::text FROM operation WHERE id = :id")
    return str((await conn.execute(query, {"id": identifier})).scalar_one())


async def test_rows_land_in_their_day_and_ids_are_unique(conn: AsyncConnection) -> None:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    made = await ensure_partitions(conn, 2)
    assert sum(name.startswith(("operation", "attempt")) for name in made) == 6
    assert await ensure_partitions(conn, 2) == []
    one_millisecond = timedelta(milliseconds=1)
    ids = {
        smallest_id(today): partition_name("operation", today),
        smallest_id(today + timedelta(days=1) - one_millisecond): partition_name("operation", today),
        smallest_id(today + timedelta(days=1)): partition_name("operation", today + timedelta(days=1)),
        smallest_id(today - one_millisecond): "operation_default",
        smallest_id(today + timedelta(days=3)): "operation_default",
        UUID(int=0): "operation_default",
        UUID(int=2**128 - 1): "operation_default",
        (now := new_id()): partition_name("operation", time_of(now)),
    }
    for identifier, where in ids.items():
        await conn.execute(insert(operation).values(row(identifier)))
        assert await partition_of(conn, identifier) == where
        with pytest.raises(IntegrityError):
            async with conn.begin_nested():
                await conn.execute(insert(operation).values(row(identifier)))


async def test_partitions_are_made_ahead(engine: AsyncEngine) -> None:
    await make_ahead(engine)
    async with engine.connect() as conn:
        assert len(await partitions(conn, "operation")) == 1 + DAYS_AHEAD
        assert len(await partitions(conn, "usage_hour")) in (1, 2)


async def test_rows_that_came_before_their_partition_move_into_it(conn: AsyncConnection) -> None:
    identifier = new_id()
    await conn.execute(insert(operation).values(row(identifier)))
    fields = {"number": 1, "upstream": "e", "model": "m", "started_at": datetime.now(UTC), "status": "ok"}
    tokens = dict.fromkeys(("input_fresh", "input_cached", "input_cache_write", "output_text", "output_reasoning"), 1)
    values = fields | tokens | {"operation_id": identifier, "usage_source": "engine", "total_seconds": 1.0}
    await conn.execute(insert(attempt).values(values))
    assert await partition_of(conn, identifier) == "operation_default"
    await ensure_partitions(conn, 0)
    assert await partition_of(conn, identifier) == partition_name("operation", time_of(identifier))
    assert (await conn.execute(text("SELECT count(*) FROM attempt"))).scalar_one() == 1
    assert (await conn.execute(text("SELECT count(*) FROM attempt_default"))).scalar_one() == 0


async def test_partitions_keep_the_checks_and_indexes_of_their_parent(conn: AsyncConnection) -> None:
    await ensure_partitions(conn, 0)
    day = partition_name("attempt", datetime.now(UTC))
    query = text("SELECT conname FROM pg_constraint WHERE conrelid = CAST(:name AS regclass) AND contype = 'c'")
    checks = [
        set((await conn.execute(query, {"name": name})).scalars()) for name in ("attempt", day, "attempt_default")
    ]
    assert len(checks[0]) == 5
    assert checks[0] == checks[1] == checks[2]
    query = text("SELECT count(*) FROM pg_index WHERE indrelid = CAST(:name AS regclass)")
    day = partition_name("operation", datetime.now(UTC))
    assert [(await conn.execute(query, {"name": name})).scalar_one() for name in ("operation", day)] == [4, 4]


@given(st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC)))
def test_the_smallest_id_of_a_moment(moment: datetime) -> None:
    identifier = smallest_id(moment)
    assert identifier.version == 7
    assert identifier.variant == "specified in RFC 4122"
    assert timedelta(0) <= moment - time_of(identifier) < timedelta(milliseconds=1)
    assert smallest_id(moment + timedelta(milliseconds=1)) > identifier


def test_new_ids_lie_between_the_moments_around_them() -> None:
    before = smallest_id(datetime.now(UTC))
    ids = [new_id() for _ in range(1000)]
    assert before < ids[0]
    assert ids == sorted(set(ids))
    assert ids[-1] < smallest_id(datetime.now(UTC) + timedelta(milliseconds=50))


def test_moments_without_an_id() -> None:
    with pytest.raises(ValueError, match="needs a time zone"):
        smallest_id(datetime(2026, 1, 1))
    with pytest.raises(ValueError, match="before 1970"):
        smallest_id(datetime(1969, 1, 1, tzinfo=UTC))


def test_names_of_partitions() -> None:
    assert is_partition("operation_20261129")
    assert is_partition("attempt_default")
    assert not is_partition("operation")
    assert not is_partition("operation_note")
