"""Ledgers made up at random, charged as the gateway charges: long digits, overrides, flat parts, unknown prices."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import people
from billing.charge import EXACT, cached_answer_charge, charge, device_cost
from billing.ids import new_id, smallest_id
from billing.prices import Payer, Price, PriceBook, PriceTerms, insert_version, load
from billing.records import NO_COLUMNS, TOKEN_CLASSES, AttemptRecord, CachedAnswer, OperationRecord, TokenClasses
from billing.tables import adjustment, attempt, operation

MODELS = ("small", "large", "priced-by-call", "free", "unpriced")


class Household(msgspec.Struct, frozen=True):
    """Whose operations they are, and the prices that they were charged at."""

    org_id: UUID
    team_id: UUID
    user_id: UUID
    keys: tuple[UUID, UUID]
    """The first has a factor of its own."""
    book: PriceBook


def _amount(rng: random.Random) -> Decimal:
    return Decimal(rng.randrange(10**12)).scaleb(-rng.randrange(6, 13))


async def move_in(conn: AsyncConnection, rng: random.Random, name: str = "Wren & Sons") -> Household:
    """An org with a team, a user and two keys, and prices that no later one has."""
    org_id = await people.create_org(conn, name)
    team_id = await people.create_team(conn, org_id, "Search")
    user_id = await people.create_user(conn, org_id, "=cmd|' /C calc'!A0", team_id)
    keys = [
        (await people.create_key(conn, org_id, n, team_id=t, user_id=user_id)).id
        for n, t in (("a", team_id), ("b", None))
    ]
    since = datetime(2026, 1, 1, tzinfo=UTC)

    def sale(model: str, **fields: Any) -> PriceTerms:
        return PriceTerms(book="sale", model=model, currency="USD", **fields)

    def rates() -> dict[str, Any]:
        return {rate: _amount(rng) for rate in TOKEN_CLASSES}

    terms = [
        sale("small", per_cached_answer=_amount(rng), **rates()),
        sale("small", tier="batch", **rates()),
        sale("large", **rates()),
        sale(
            "priced-by-call",
            per_request=_amount(rng),
            per_image=_amount(rng),
            per_cached_answer=_amount(rng),
            **rates(),
        ),
        sale("free", **dict.fromkeys(TOKEN_CLASSES, Decimal(0))),
        sale("", tier="", scope_kind="key", scope_id=str(keys[0]), factor=_amount(rng)),
        sale("large", tier="", scope_kind="org", scope_id=str(org_id), **rates()),
        PriceTerms(book="cost", model="large", upstream="hosted", currency="USD", **rates()),
        PriceTerms(book="cost", model="", upstream="engine", currency="USD", device_hour=_amount(rng)),
    ]
    for each in terms:
        await insert_version(conn, each, since, "operator")
    return Household(org_id, team_id, user_id, (keys[0], keys[1]), await load(conn))


def operations(
    rng: random.Random, household: Household, start: datetime, end: datetime, number: int
) -> Iterator[OperationRecord]:
    for _ in range(number):
        at = start + timedelta(microseconds=rng.randrange((end - start) // timedelta(microseconds=1)))
        yield _operation(rng, household, at)


def _operation(rng: random.Random, household: Household, at: datetime) -> OperationRecord:
    key = rng.choice(household.keys)
    team = household.team_id if key == household.keys[0] else None
    model, status = rng.choice(MODELS), rng.choice(["ok", "ok", "ok", "client_closed", "upstream_error", "refused"])
    attempts = [] if status == "refused" else list(_attempts(rng, household, model, key, at))
    cached = None
    if status == "ok" and rng.random() < 0.2:
        cached, attempts = _cached(household.book.sale(model, payer=_payer(household, key)), attempts), []
    charged: list[Any] = attempts if cached is None else [cached]
    billed, cost = ([getattr(each, name) for each in charged] for name in ("billed", "cost"))
    fields: dict[str, Any] = {
        "id": UUID(int=smallest_id(at).int | rng.getrandbits(62)),
        "started_at": at,
        "org_id": household.org_id,
        "team_id": team,
        "user_id": household.user_id if rng.random() < 0.8 else None,
        "key_id": key,
        "tags": rng.choice([{}, {"app": "editor"}, {"app": "@shell", "env": "test"}]),
        "requested_model": "auto",
        "model": None if status == "refused" else model,
        "stream": rng.random() < 0.5,
        "status": status,
        "http_status": 200,
        "total_seconds": rng.random(),
        "billed": None if None in billed or not billed else sum_exactly(billed),
        "cost": None if None in cost or not cost else sum_exactly(cost),
        "currency": "USD",
        "attempts": attempts,
        "cached": None if cached is None else cached.answer,
    }
    return OperationRecord(**fields)


class _Cached(NamedTuple):
    answer: CachedAnswer
    billed: Decimal | None
    cost: Decimal = Decimal(0)


def _cached(price: Price | None, made: list[AttemptRecord]) -> _Cached:
    """An answer from the response cache, in place of what was `made`."""
    last = made[-1]
    answer = CachedAnswer(
        cached_from=new_id(),
        saved_prompt_tokens=last.tokens.prompt_tokens,
        saved_completion_tokens=last.tokens.completion_tokens,
        saved_billed=last.billed,
        saved_cost=last.cost,
        price_version_id=price.id if price else None,
        price_override_id=price.override_id if price else None,
    )
    return _Cached(answer, cached_answer_charge(price))


def _payer(household: Household, key: UUID) -> Payer:
    return Payer(household.org_id, household.team_id if key == household.keys[0] else None, key)


def _attempts(rng: random.Random, household: Household, model: str, key: UUID, at: datetime) -> Iterator[AttemptRecord]:
    tier: Any = rng.choice(["standard", "batch"]) if model == "small" else "standard"
    sale = household.book.sale(model, tier, _payer(household, key))
    last = rng.randrange(1, 3)
    for number in range(1, last + 1):
        counts = [rng.choice([0, rng.randrange(1, 100_000)]) for _ in range(5)]
        tokens = TokenClasses(**dict(zip(TokenClasses.__struct_fields__, counts, strict=True)))
        upstream = rng.choice(["engine", "hosted", "reported"])
        cost_price = household.book.cost(model, upstream)
        seconds = [rng.random() for _ in range(2)] if upstream == "engine" else [None, None]
        cost = charge(cost_price, tokens)
        if upstream == "engine" and cost_price is not None and seconds[0] is not None and seconds[1] is not None:
            cost = device_cost(cost_price, seconds[0] + seconds[1])
        elif upstream == "reported":
            cost = _amount(rng)
        images = rng.randrange(3) if sum(counts) else 0
        yield AttemptRecord(
            number=number,
            upstream=upstream,
            model=model,
            started_at=at,
            status="ok",
            tokens=tokens,
            usage_source="upstream",
            prefill_device_seconds=seconds[0],
            decode_device_seconds=seconds[1],
            total_seconds=1.0,
            price_version_id=sale.id if sale else None,
            price_override_id=sale.override_id if sale else None,
            cost_version_id=cost_price.id if cost_price else None,
            billed=charge(sale, tokens, images) if number == last else Decimal(0),
            cost=cost,
            tier=tier,
            images=images,
            billable=number == last,
        )


async def store(conn: AsyncConnection, records: list[OperationRecord]) -> None:
    def row(record: msgspec.Struct, *without: str) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(record).items() if name not in without}

    attempts = [
        row(each, "tokens") | msgspec.structs.asdict(each.tokens) | {"operation_id": record.id}
        for record in records
        for each in record.attempts
    ]
    nothing = dict.fromkeys(CachedAnswer.__struct_fields__)
    rows = [row(each, *NO_COLUMNS) | (row(each.cached) if each.cached is not None else nothing) for each in records]
    await conn.execute(insert(operation), rows)
    if attempts:
        await conn.execute(insert(attempt), attempts)


async def adjust(conn: AsyncConnection, record: OperationRecord, billed: Decimal | None, cost: Decimal | None) -> None:
    values = {
        "id": new_id(), "operation_id": record.id, "number": 1, "started_at": record.started_at, "currency": "USD",
        "billed_delta": billed, "cost_delta": cost, "reason": "wrong price", "actor": "test",
    }  # fmt: skip
    await conn.execute(insert(adjustment).values(values))


def sum_exactly(amounts: list[Any]) -> Decimal:
    total = Decimal(0)
    for amount in amounts:
        if amount is not None:
            total = EXACT.add(total, amount)
    return total
