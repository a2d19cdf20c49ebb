"""Fills a migrated database with a month of a small company's operations, always the same for one seed.

By hand: `python tests/dashboards/sample_ledger.py DATABASE_URL`.
"""

import asyncio
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from billing import people, prices
from billing.charge import charge, device_cost
from billing.ids import smallest_id
from billing.prices import Price, PriceBook, PriceTerms
from billing.records import NO_COLUMNS, AttemptRecord, OperationRecord, Status, TokenClasses
from billing.tables import attempt, operation

SMALL, LARGE, HOSTED = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "hosted-70b"
PEOPLE = {
    # name: (team, share of the operations, long shared prompts)
    "amara.okafor": ("Search", 30, True),
    "jonas.lindqvist": ("Search", 22, True),
    "李雯": ("Support", 18, False),
    "priya.raman": ("Support", 14, True),
    "tomás.herrera": ("Billing tools", 9, False),
    "release-bot": ("Billing tools", 6, False),
    "wren": ("Search", 1, False),
}
REASONS = {
    SMALL: ["short prompt", "no code", "one question"],
    LARGE: ["code in the prompt", "asks for several steps", "1,204 prompt tokens"],
}

PRICES = [
    PriceTerms(
        book="sale", model=SMALL, currency="USD",
        input_fresh=Decimal("0.05"), input_cached=Decimal("0.01"), input_cache_write=Decimal("0.05"),
        output_text=Decimal("0.20"), output_reasoning=Decimal("0.20"),
    ),
    PriceTerms(
        book="sale", model=LARGE, currency="USD",
        input_fresh=Decimal("0.20"), input_cached=Decimal("0.04"), input_cache_write=Decimal("0.20"),
        output_text=Decimal("0.80"), output_reasoning=Decimal("0.80"),
    ),
    PriceTerms(
        book="sale", model=HOSTED, currency="USD",
        input_fresh=Decimal("0.90"), input_cached=Decimal("0.45"), input_cache_write=Decimal("1.10"),
        output_text=Decimal("2.70"), output_reasoning=Decimal("2.70"),
    ),
    PriceTerms(book="cost", model=SMALL, upstream="engine", currency="USD", device_hour=Decimal("0.20")),
    PriceTerms(book="cost", model=LARGE, upstream="engine", currency="USD", device_hour=Decimal("0.20")),
]  # fmt: skip


class Member(msgspec.Struct, frozen=True):
    name: str
    user_id: UUID
    team_id: UUID
    org_id: UUID
    key_id: UUID
    weight: int
    shares_prompts: bool


async def fill(
    connection: AsyncConnection, now: datetime, operations: int = 4000, days: float = 30, seed: int = 7
) -> None:
    """Add people, prices and `operations` operations in the `days` before `now`, the last a minute ago."""
    rng = random.Random(seed)
    await prices.seed(connection, PRICES)
    book = await prices.load(connection)
    members = await _members(connection)
    records = list(_records(rng, book, members, now, operations, days))
    for start in range(0, len(records), 500):
        await insert_records(connection, records[start : start + 500])


async def insert_records(connection: AsyncConnection, records: list[OperationRecord]) -> None:
    """Put `records` into the two tables as they are."""
    operations = [
        _row(record, *NO_COLUMNS) | (msgspec.structs.asdict(record.cached) if record.cached else {})
        for record in records
    ]
    attempts = [
        _row(each, "tokens") | msgspec.structs.asdict(each.tokens) | {"operation_id": record.id}
        for record in records
        for each in record.attempts
    ]
    await connection.execute(insert(operation), operations)
    if attempts:
        await connection.execute(insert(attempt), attempts)


def _row(record: msgspec.Struct, *without: str) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(record).items() if name not in without}


async def _members(connection: AsyncConnection) -> list[Member]:
    org_id = await people.create_org(connection, "Wren & Sons")
    teams = {
        name: await people.create_team(connection, org_id, name)
        for name in dict.fromkeys(t for t, _, _ in PEOPLE.values())
    }
    members = []
    for name, (team, weight, shares_prompts) in PEOPLE.items():
        user_id = await people.create_user(connection, org_id, name, teams[team])
        key = await people.create_key(connection, org_id, f"{name} laptop", team_id=teams[team], user_id=user_id)
        members.append(Member(name, user_id, teams[team], org_id, key.id, weight, shares_prompts))
    return members


def _records(
    rng: random.Random, book: PriceBook, members: list[Member], now: datetime, number: int, days: float
) -> Iterator[OperationRecord]:
    times = sorted(_working_time(rng, now, days) for _ in range(number - 1))
    for at in [*times, now - timedelta(minutes=1)]:
        member = rng.choices(members, [each.weight for each in members])[0]
        yield _record(rng, book, member, at)


def _working_time(rng: random.Random, now: datetime, days: float) -> datetime:
    """More in the afternoon than at night, fewer at weekends, slowly growing."""
    while True:
        at = now - timedelta(seconds=86_400 * days * (1 - rng.random() ** 0.8)) - timedelta(minutes=1)
        busy = 1.0 if 8 <= at.hour < 18 else 0.18
        if rng.random() < busy * (0.3 if at.weekday() >= 5 else 1.0):
            return at


def _record(rng: random.Random, book: PriceBook, member: Member, at: datetime) -> OperationRecord:
    model = rng.choices([SMALL, LARGE, HOSTED], [64, 33, 3])[0]
    status: Status = rng.choices(["ok", "client_closed", "upstream_error", "refused", "invalid"], [950, 22, 9, 14, 5])[
        0
    ]
    asked = (
        model
        if model == HOSTED
        else rng.choices(["auto", "small" if model == SMALL else "large", model], [78, 14, 8])[0]
    )
    dispatched = status not in ("refused", "invalid")
    attempts = [_attempt(rng, book, member, model, at, status)] if dispatched else []
    if attempts and rng.random() < 0.012:
        attempts = _after_a_failure(book, attempts[0])
    errors = {
        "upstream_error": "the engine closed the connection after 14 tokens",
        "refused": "budget of key used up: 5.00 USD a month, resets 2026-12-01 00:00 UTC",
        "invalid": "temperature: must be 0 or more, not -1",
    }
    last = attempts[-1] if attempts else None
    ended = attempts and (last.started_at - at).total_seconds() + last.total_seconds
    routed = asked == "auto"
    return OperationRecord(
        id=UUID(int=smallest_id(at).int | rng.getrandbits(62)),
        started_at=at,
        org_id=member.org_id,
        team_id=member.team_id,
        user_id=member.user_id,
        key_id=member.key_id,
        tags={"app": "editor", "env": "production"} if member.shares_prompts else {},
        requested_model=asked,
        model=model if dispatched else None,
        route_reasons=REASONS[model] if routed and dispatched else [],
        route_score=round(rng.uniform(0.05, 0.48) if model == SMALL else rng.uniform(0.52, 0.96), 3)
        if routed and dispatched
        else None,
        stream=rng.random() < 0.7,
        status=status,
        http_status={"ok": 200, "client_closed": 499, "upstream_error": 502, "refused": 402, "invalid": 400}[status],
        finish_reason=rng.choice(["stop", "stop", "stop", "length"]) if status == "ok" else None,
        error=errors.get(status),
        ttft_seconds=last.ttft_seconds if last else None,
        total_seconds=ended + 0.004 if ended else 0.003,
        billed=_sum([each.billed for each in attempts]),
        cost=_sum([each.cost for each in attempts]),
        currency="USD",
        attempts=attempts,
    )


def _attempt(
    rng: random.Random, book: PriceBook, member: Member, model: str, at: datetime, status: Status
) -> AttemptRecord:
    prompt = int(rng.lognormvariate(6.6 if member.shares_prompts else 5.2, 0.8)) + 12
    cached = (
        int(prompt * rng.uniform(0.5, 0.95)) // 16 * 16
        if rng.random() < (0.75 if member.shares_prompts else 0.25)
        else 0
    )
    output = 14 if status == "upstream_error" else int(rng.lognormvariate(4.9, 0.7)) + 1
    tokens = TokenClasses(input_fresh=prompt - cached, input_cached=cached, output_text=output)
    speed = {SMALL: 4000, LARGE: 1500, HOSTED: 9000}[model]
    prefill, decode = (prompt - cached) / speed, output / (speed / 40)
    queued = rng.expovariate(60)
    engine = model != HOSTED
    sale, cost = book.sale(model), book.cost(model, "engine" if engine else "hosted")
    return AttemptRecord(
        number=1,
        upstream="engine" if engine else "hosted",
        model=model,
        started_at=at + timedelta(milliseconds=3),
        status=status,
        http_status=200,
        error="connection reset by peer" if status == "upstream_error" else None,
        tokens=tokens,
        usage_source="engine" if engine else "upstream",
        generated_tokens=output + 1 if engine else None,
        recomputed_tokens=0 if engine else None,
        prefill_device_seconds=prefill if engine else None,
        decode_device_seconds=decode * 0.3 if engine else None,
        kv_block_seconds=(prompt + output) / 16 * decode if engine else None,
        queue_seconds=queued if engine else None,
        ttft_seconds=queued + prefill + 0.02,
        total_seconds=queued + prefill + decode + 0.02,
        preemptions=0 if engine else None,
        price_version_id=sale.id if sale else None,
        cost_version_id=cost.id if cost else None,
        billed=charge(sale, tokens),
        cost=device_cost(cost, prefill + decode * 0.3) if cost else None,
    )


def _after_a_failure(book: PriceBook, second: AttemptRecord) -> list[AttemptRecord]:
    """`second`, and before it a first attempt that got a 503 at once."""
    sale: Price | None = book.sale(second.model)
    first = AttemptRecord(
        number=1,
        upstream="engine-b",
        model=second.model,
        started_at=second.started_at,
        status="upstream_error",
        http_status=503,
        error="503 from engine-b: still loading its models",
        usage_source="engine",
        total_seconds=0.041,
        price_version_id=sale.id if sale else None,
        billed=Decimal(0),
        cost=Decimal(0),
    )
    later = second.started_at + timedelta(milliseconds=45)
    return [first, msgspec.structs.replace(second, number=2, started_at=later)]


def _sum(amounts: list[Decimal | None]) -> Decimal | None:
    if not amounts or None in amounts:
        return None
    return sum((amount for amount in amounts if amount is not None), Decimal(0))


async def _main(url: str) -> None:
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await fill(connection, datetime.now(UTC))
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
