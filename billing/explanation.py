"""Why one operation was billed what it was, and cost what it did: each price times each count, to the last digit."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from uuid import UUID

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.charge import EXACT, add_up, device_cost, total
from billing.charged import CACHED_ANSWER, PARTS, Part
from billing.operations import OperationDetail, find_operation
from billing.prices import Price, effective
from billing.records import TOKEN_CLASSES, AttemptRecord, CachedAnswer, OperationRecord
from billing.reports import EVERYTHING, Within
from billing.tables import adjustment


class PartAmount(msgspec.Struct, frozen=True, kw_only=True):
    """`quantity` * `unit_price` / `per` = `amount`, exactly; of device time rounded as `billing.charge` says."""

    part: str
    quantity: Decimal
    unit: str
    unit_price: Decimal
    per: int
    amount: Decimal


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """One side of an attempt: what was billed, or what it cost."""

    amount: Decimal | None
    price: Price | None
    """The version it was made with, an override applied."""
    list_price: Price | None
    """The same before a factor; None where none was used."""
    parts: tuple[PartAmount, ...]
    """Empty where they do not say it: then `note` does."""
    note: str | None


class AttemptExplanation(msgspec.Struct, frozen=True, kw_only=True):
    record: AttemptRecord
    billed: Amount
    cost: Amount


class Adjusted(msgspec.Struct, frozen=True, kw_only=True):
    """A later correction of a price: what it changed."""

    made_at: datetime
    number: int
    """Of the attempt."""
    billed_delta: Decimal | None
    cost_delta: Decimal | None
    reason: str
    actor: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    operation: OperationDetail
    attempts: tuple[AttemptExplanation, ...]
    cached: Amount | None
    """What an answer from the response cache was billed; None where it was computed."""
    adjustments: tuple[Adjusted, ...]
    billed: Decimal | None
    """Adjustments counted in; None: unknown."""
    cost: Decimal | None
    margin: Decimal | None


async def explain(conn: AsyncConnection, operation_id: UUID, *, within: Within = EVERYTHING) -> Explanation | None:
    """None when there is no such operation, or it is outside `within`."""
    found = await find_operation(conn, operation_id, within=within)
    if found is None:
        return None
    record, versions = found.record, found.prices
    columns = [adjustment.c[name] for name in Adjusted.__struct_fields__]
    query = select(*columns).where(adjustment.c.operation_id == operation_id).order_by(adjustment.c.id)
    adjustments = tuple(Adjusted(**row) for row in (await conn.execute(query)).mappings())
    billed = _with(record.billed, [each.billed_delta for each in adjustments])
    cost = _cost_of(record, adjustments)
    return Explanation(
        operation=found,
        attempts=tuple(
            AttemptExplanation(record=each, billed=_billed(each, versions), cost=_cost(each, versions))
            for each in record.attempts
        ),
        cached=None if record.cached is None else _billed_again(record.cached, record.billed, versions),
        adjustments=adjustments,
        billed=billed,
        cost=cost,
        margin=None if billed is None or cost is None else EXACT.subtract(billed, cost),
    )


def _billed(attempt: AttemptRecord, versions: Mapping[UUID, Price]) -> Amount:
    named, override = _version(versions, attempt.price_version_id), _version(versions, attempt.price_override_id)
    price = effective(named, override)
    parts = _parts(attempt, price)
    note = None
    if not attempt.billable:
        note = "the caller does not pay for it: another attempt answered, or nothing was reported"
    elif attempt.billed is None:
        note = _without_price(attempt, price)
    elif add_up(part.amount for part in parts) != attempt.billed:
        note = "it names no price" if price is None else "its prices do not give this amount"
    return Amount(
        amount=attempt.billed,
        price=price,
        list_price=named if override is not None and override.factor is not None else None,
        parts=() if note else parts,
        note=note,
    )


def _billed_again(cached: CachedAnswer, amount: Decimal | None, versions: Mapping[UUID, Price]) -> Amount:
    named, override = _version(versions, cached.price_version_id), _version(versions, cached.price_override_id)
    price = effective(named, override)
    rate = None if price is None else price.per_cached_answer
    note = None
    if amount is None:
        note = "unknown: its model had no price"
    elif rate is None:
        note = "its price has no part for answers from the response cache: they are free"
    return Amount(
        amount=amount,
        price=price,
        list_price=named if override is not None and override.factor is not None else None,
        parts=() if rate is None else (_part(CACHED_ANSWER, 1, rate),),
        note=note,
    )


def _cost(attempt: AttemptRecord, versions: Mapping[UUID, Price]) -> Amount:
    price = _version(versions, attempt.cost_version_id)
    parts: tuple[PartAmount, ...] = ()
    note = None
    if price is not None and price.device_hour is not None:
        parts = _device(attempt, price, price.device_hour)
    elif price is not None:
        parts = _parts(attempt, price)
    if attempt.cost is None and price is not None and price.device_hour is not None:
        note = "unknown: no device time was reported"
    elif attempt.cost is None and price is not None:
        note = _without_price(attempt, price)
    elif attempt.cost is None:
        note = f"unknown: nobody said what {attempt.model} costs on {attempt.upstream}"
    elif add_up(part.amount for part in parts) != attempt.cost:
        note = "nothing was computed" if attempt.cost == 0 else f"as {attempt.upstream} reported it"
    return Amount(amount=attempt.cost, price=price, list_price=None, parts=() if note else parts, note=note)


def _without_price(attempt: AttemptRecord, price: Price | None) -> str:
    """Why an amount is unknown."""
    if price is None:
        return f"unknown: {attempt.model} had no price"
    used = [name for name in TOKEN_CLASSES if getattr(attempt.tokens, name) and getattr(price, name) is None]
    return f"unknown: its price has none for {' and '.join(name.replace('_', ' ') for name in used) or 'what was used'}"


def _version(versions: Mapping[UUID, Price], identifier: UUID | None) -> Price | None:
    return None if identifier is None else versions.get(identifier)


def _parts(attempt: AttemptRecord, price: Price | None) -> tuple[PartAmount, ...]:
    tokens = attempt.tokens
    used = tokens.prompt_tokens + tokens.completion_tokens > 0
    found = []
    for part in PARTS:
        quantity = {"request": int(used), "image": attempt.images}.get(part.name)
        if quantity is None:
            quantity = getattr(tokens, part.name)
        rate = getattr(price, part.rate, None)
        if rate is None or not quantity:
            continue
        found.append(_part(part, quantity, rate))
    return tuple(found)


def _part(part: Part, quantity: int, rate: Decimal) -> PartAmount:
    amount = EXACT.divide(EXACT.multiply(Decimal(quantity), rate), Decimal(part.per))
    return PartAmount(
        part=part.name, quantity=Decimal(quantity), unit=part.unit, unit_price=rate, per=part.per, amount=amount
    )


def _device(attempt: AttemptRecord, price: Price, hour: Decimal) -> tuple[PartAmount, ...]:
    if attempt.prefill_device_seconds is None or attempt.decode_device_seconds is None:
        return ()
    seconds = attempt.prefill_device_seconds + attempt.decode_device_seconds
    amount = device_cost(price, seconds)
    assert amount is not None, "the price has a device part"
    quantity = Decimal(repr(seconds))
    return (PartAmount(part="device", quantity=quantity, unit="seconds", unit_price=hour, per=3600, amount=amount),)


def _cost_of(record: OperationRecord, adjustments: Sequence[Adjusted]) -> Decimal | None:
    """Unknown until all of its attempts' costs are known."""
    adjusted = {each.number for each in adjustments if each.cost_delta is not None}
    recorded = record.cost
    if recorded is None and adjusted:
        if any(each.cost is None and each.number not in adjusted for each in record.attempts):
            return None
        recorded = total(each.cost or Decimal(0) for each in record.attempts)
    return _with(recorded, [each.cost_delta for each in adjustments])


def _with(amount: Decimal | None, deltas: Sequence[Decimal | None]) -> Decimal | None:
    """An unknown amount stays unknown until it is adjusted, and counts as 0 then."""
    for delta in deltas:
        if delta is not None:
            amount = EXACT.add(amount or Decimal(0), delta)
    return amount
