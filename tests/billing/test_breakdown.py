"""Who cost what: equal to the ledger to the last digit, whether rollups are there, stale or not made yet."""

import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
from random_ledger import Household, adjust, move_in, operations, store, sum_exactly
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import rollups
from billing.breakdown import UsageRow, usage_by
from billing.filters import Filters
from billing.records import TOKEN_CLASSES, OperationRecord, TokenClasses

START = datetime(2026, 9, 28, 3, 17, tzinfo=UTC)
END = START + timedelta(days=4, hours=5, minutes=11)
QUESTIONS = [
    ["user"], ["team"], ["org"], ["key"], ["model"], ["day"], ["hour"], ["tag:app"], ["tag:app", "model"],
    ["user", "model"], ["tag:app", "user"], ["day", "key"], ["tag:app", "tag:env"], [],
]  # fmt: skip


async def filled(conn: AsyncConnection) -> tuple[Household, list[OperationRecord]]:
    rng = random.Random(11)
    household = await move_in(conn, rng)
    records = list(operations(rng, household, START - timedelta(days=1), END + timedelta(days=1), 150))
    await store(conn, records)
    await adjust(conn, next(record for record in records if record.attempts), Decimal("-0.00000000000000000001"), None)
    return household, records


async def test_rollups_and_the_ledger_say_the_same(conn: AsyncConnection, engine: AsyncEngine) -> None:
    await filled(conn)
    await conn.commit()
    async with engine.connect() as other:
        stale = [await usage_by(other, question, START, END, time_zone="Asia/Kolkata") for question in QUESTIONS]
    await rollups.refresh(engine)
    async with engine.connect() as other:
        assert await rollups.stale_hours(other) == []
        fresh = [await usage_by(other, question, START, END, time_zone="Asia/Kolkata") for question in QUESTIONS]
        await other.execute(text("UPDATE usage_hour SET billed = billed + 1"))  # so they are what is read
        spoilt = await usage_by(other, ["user"], START, END)
        await other.rollback()
    assert fresh == stale
    assert spoilt != fresh[0]


async def test_sums_are_those_of_the_operations(conn: AsyncConnection) -> None:
    household, records = await filled(conn)
    records = [record for record in records if START <= record.started_at < END]
    [total] = await usage_by(conn, [], START, END)
    assert total.operations == len(records)
    adjusted = total.billed_adjustment
    assert total.billed == sum_exactly([adjusted, *(record.billed for record in records)])
    assert total.cost == sum_exactly([record.cost for record in records])
    attempts = [attempt for record in records for attempt in record.attempts]
    sums = {name: sum(getattr(attempt.tokens, name) for attempt in attempts) for name in TOKEN_CLASSES}
    assert total.tokens == TokenClasses(**sums)
    unknown = [record for record in records if record.status != "refused" and record.billed is None]
    assert total.billed_unknown == len(unknown) > 0
    keys = {row.ids["key"]: row for row in await usage_by(conn, ["key"], START, END)}
    for key in household.keys:
        of_key = [record for record in records if record.key_id == key]
        assert keys[str(key)].operations == len(of_key)
    by_user = await usage_by(conn, ["user"], START, END, Filters(key_id=household.keys[1], model="large"))
    chosen = [record for record in records if record.key_id == household.keys[1] and record.model == "large"]
    assert sum(row.operations for row in by_user) == len(chosen)
    assert {row.ids["user"] for row in by_user} == {each.user_id and str(each.user_id) for each in chosen}
    from_cache = [record.cached for record in records if record.cached is not None]
    assert total.cached_answers == len(from_cache) > 0
    assert total.saved_prompt_tokens == sum(each.saved_prompt_tokens for each in from_cache)
    assert total.saved_completion_tokens == sum(each.saved_completion_tokens for each in from_cache)


async def test_days_and_tags_are_those_of_the_operations(conn: AsyncConnection) -> None:
    _, records = await filled(conn)
    records = [record for record in records if START <= record.started_at < END]
    zone = "America/St_Johns"
    days = await usage_by(conn, ["day"], START, END, time_zone=zone)
    assert [row.by["day"] for row in days] == sorted(row.by["day"] or "" for row in days)
    for row in days:
        local = [r for r in records if f"{r.started_at.astimezone(ZoneInfo(zone)):%Y-%m-%d}" == row.by["day"]]
        assert row.operations == len(local)
    hours = await usage_by(conn, ["hour"], START, END, time_zone=zone)
    assert sum(row.operations for row in hours) == len(records)
    assert all((row.by["hour"] or "").endswith(":00-02:30") for row in hours)
    tags = {row.by["tag:app"]: row for row in await usage_by(conn, ["tag:app"], START, END)}
    for value in ("editor", "@shell"):
        carrying = [record for record in records if record.tags.get("app") == value]
        assert tags[value].operations == len(carrying)
        [alone] = await usage_by(conn, ["org"], START, END, Filters(tag=("app", value)))
        assert alone.operations == len(carrying)
    assert set(tags) == {"editor", "@shell"}


async def test_what_cannot_be_shown_says_why(conn: AsyncConnection) -> None:
    for dimensions, zone, end, problem in (
        (["colour"], "UTC", END, "cannot be shown by 'colour'; use user"),
        (["tag:"], "UTC", END, "cannot be shown by 'tag:'"),
        (["user", "user"], "UTC", END, "asked for twice"),
        (["user"], "Mars/Base", END, "is not a time zone"),
        (["user"], "UTC", START, "the period is empty"),
    ):
        with pytest.raises(ValueError, match=problem):
            await usage_by(conn, dimensions, START, end, time_zone=zone)


def a_row(**changes: object) -> UsageRow:
    fields: dict[str, object] = {
        "by": {}, "ids": {}, "currency": "USD", "operations": 3, "failed": 0, "refused": 0,
        "tokens": TokenClasses(input_fresh=30, input_cached=10), "billed": Decimal(4), "billed_unknown": 0,
        "cost": Decimal(1), "cost_unknown": 0, "margin": Decimal(3), "billed_adjustment": Decimal(0),
        "cost_adjustment": Decimal(0),
    }  # fmt: skip
    return UsageRow(**fields | changes)  # type: ignore[arg-type]


def test_shares_are_of_what_is_known() -> None:
    assert a_row().margin_share == Decimal("0.75")
    assert a_row().cached_share == Decimal("0.25")
    assert a_row(cost_unknown=1, billed=Decimal(9)).margin_share == Decimal("0.75")
    assert a_row(cost_unknown=1, billed_unknown=1).margin_share is None
    assert a_row(margin=None).margin_share is None
    assert a_row(billed=Decimal(0)).margin_share is None
    assert a_row(tokens=TokenClasses(output_text=1)).cached_share is None
