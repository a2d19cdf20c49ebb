"""Re-rating: what a corrected price changes about calls that are over. Rows of `adjustment` say it; the ledger stays.

A correction is a version that was entered after a call and holds from before it. What a gateway charged in the moment
before it heard of a new price is no error, and stays.

Budgets are left alone: a window, open or closed, keeps what was charged when the call was admitted, so that an
adjustment neither refuses a call after the fact nor frees money that was spent. Who wants to give a customer room back
raises the limit. Reports, exports and invoices add the adjustments to the amounts of the ledger.
"""

from bisect import bisect_right
from collections.abc import AsyncIterator, Collection, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, NamedTuple, get_args
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement, Row, Select, func, insert, literal_column, select, true, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import prices
from billing.charge import EXACT, cached_answer_charge, charge, device_cost
from billing.ids import new_id, smallest_id
from billing.prices import Book, Payer, Price, PriceBook
from billing.records import CACHED_ANSWER_NUMBER, TOKEN_CLASSES, UNSETTLED, TokenClasses
from billing.tables import adjustment, attempt, operation

Amount = Literal["billed", "cost"]

PAGE = 1_000
"""Attempts in one query."""
_LOCK = 0x6661727468_05  # "farth", 5: one re-rates at a time
_ID_SLACK = timedelta(hours=1)  # an id may be made a little before or after `started_at` is read


class Adjustment(msgspec.Struct, frozen=True, kw_only=True):
    """What changes about one attempt, or one answer from the response cache."""

    operation_id: UUID
    number: int
    """CACHED_ANSWER_NUMBER where there is no attempt."""
    started_at: datetime
    """Of the operation."""
    currency: str
    billed_delta: Decimal | None = None
    """None: no change. What was unknown before counts as 0."""
    cost_delta: Decimal | None = None
    price_version_from: UUID | None = None
    price_version_to: UUID | None = None
    override_from: UUID | None = None
    override_to: UUID | None = None
    cost_version_from: UUID | None = None
    cost_version_to: UUID | None = None


class Rerating(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    attempts: int
    """Looked at, with answers from the response cache."""
    adjusted: int
    billed_delta: dict[str, Decimal]
    """By currency."""
    cost_delta: dict[str, Decimal]
    unpriced: int
    """Attempts that have an amount, and none by the corrected book: they keep it."""


class _Rates:
    """The books of all times as they are known now, and what of them was entered later."""

    def __init__(self, versions: Sequence[Price]) -> None:
        self.versions = {version.id: version for version in versions}
        self._of: dict[tuple[str, str, str], list[Price]] = {}
        for version in versions:
            self._of.setdefault((version.book, version.model, version.upstream), []).append(version)
        self._moments = sorted({version.effective_at for version in versions})
        self._books: dict[tuple[int, str], PriceBook] = {}

    def at(self, row: Row[Any]) -> PriceBook:
        """When the call began, in the currency that it is charged in."""
        moment = row.operation_started_at
        key = (bisect_right(self._moments, moment), row.currency)
        if key not in self._books:
            self._books[key] = PriceBook(self.versions.values(), moment, row.currency)
        return self._books[key]

    def corrected(self, row: Row[Any], book: Book, models: Collection[str], upstream: str = "") -> bool:
        """Whether a version that may be the call's was entered after it (ids tell the time) and holds from before."""
        return any(
            version.id > row.operation_id and version.effective_at <= row.operation_started_at
            for model in models
            for version in self._of.get((book, model, upstream), ())
        )


async def rerate(
    conn: AsyncConnection,
    start: datetime,
    end: datetime,
    *,
    reason: str,
    actor: str,
    model: str | None = None,
    dry_run: bool = False,
) -> Rerating:
    """Bring what calls of [start, end) were charged and cost to what the book, as corrected, says of their time.

    `model`: only operations that were routed to it (what they are billed), and attempts of it (what they cost). Run
    twice it adds nothing. Raises ValueError for an empty period, a moment without a time zone, or an empty reason.
    """
    if start.tzinfo is None or end.tzinfo is None:
        raise ValueError("both ends of the period need a time zone, like 2026-12-01T00:00:00Z")
    if start >= end:
        raise ValueError(f"the period ends at {end.isoformat()}, which is not after its start {start.isoformat()}")
    if not reason.strip():
        raise ValueError("say why: the reason stands in every adjustment")
    await conn.execute(select(func.pg_advisory_xact_lock(_LOCK)))  # so that two at once do not both add the same
    rates = _Rates(await prices.load_all(conn))
    seen = adjusted = unpriced = 0
    sums: dict[Amount, dict[str, Decimal]] = {"billed": {}, "cost": {}}
    async for rows in _all(conn, start, end):
        found = []
        for row in rows:
            seen += 1
            made, lacking = _adjust(row, rates, model)
            unpriced += lacking
            if made is not None:
                found.append(made)
        adjusted += len(found)
        for made in found:
            for name in get_args(Amount):
                delta, by_currency = getattr(made, f"{name}_delta"), sums[name]
                if delta is not None:
                    by_currency[made.currency] = EXACT.add(by_currency.get(made.currency, Decimal(0)), delta)
        if found and not dry_run:
            common = {"reason": reason.strip(), "actor": actor}
            rows_of = [msgspec.structs.asdict(made) | common | {"id": new_id()} for made in found]
            await conn.execute(insert(adjustment), rows_of)
    return Rerating(
        attempts=seen, adjusted=adjusted, billed_delta=sums["billed"], cost_delta=sums["cost"], unpriced=unpriced
    )


async def _all(conn: AsyncConnection, start: datetime, end: datetime) -> AsyncIterator[Sequence[Row[Any]]]:
    """Attempts of the period with their operation and what has been adjusted so far, in the order of their ids; then
    answers from the response cache."""
    for page in (_page, _page_of_cached_answers):
        after: tuple[UUID, int] = (smallest_id(start - _ID_SLACK), 0)
        while rows := (await conn.execute(page(start, end, after))).all():
            yield rows
            after = (rows[-1].operation_id, rows[-1].number)


def _page(start: datetime, end: datetime, after: tuple[UUID, int]) -> Select[Any]:
    before = (
        select(
            func.sum(adjustment.c.billed_delta).label("billed_before"),
            func.sum(adjustment.c.cost_delta).label("cost_before"),
        )
        .where(adjustment.c.operation_id == attempt.c.operation_id, adjustment.c.number == attempt.c.number)
        .lateral()
    )
    return (
        select(
            attempt,
            operation.c.started_at.label("operation_started_at"),
            operation.c.model.label("routed_model"),
            *(operation.c[name] for name in ("org_id", "team_id", "key_id", "currency")),
            before,
        )
        .join(operation, operation.c.id == attempt.c.operation_id)
        .join(before, true())
        .where(
            tuple_(attempt.c.operation_id, attempt.c.number) > after,
            attempt.c.operation_id >= after[0],  # so that only the partitions that matter are looked at
            attempt.c.operation_id < smallest_id(end + _ID_SLACK),
            operation.c.started_at >= start,
            operation.c.started_at < end,
        )
        .order_by(attempt.c.operation_id, attempt.c.number)
        .limit(PAGE)
    )


def _page_of_cached_answers(start: datetime, end: datetime, after: tuple[UUID, int]) -> Select[Any]:
    number: ColumnElement[int] = literal_column(str(CACHED_ANSWER_NUMBER))
    before = (
        select(func.sum(adjustment.c.billed_delta).label("billed_before"))
        .where(adjustment.c.operation_id == operation.c.id)
        .lateral()
    )
    return (
        select(
            operation.c.id.label("operation_id"),
            number.label("number"),
            operation.c.started_at.label("operation_started_at"),
            operation.c.model.label("routed_model"),
            *(operation.c[name] for name in ("org_id", "team_id", "key_id", "currency")),
            *(operation.c[name] for name in ("billed", "cached_from", "price_version_id", "price_override_id")),
            before,
        )
        .join(before, true())
        .where(
            operation.c.cached_from.is_not(None),
            operation.c.id > after[0],
            operation.c.id < smallest_id(end + _ID_SLACK),
            operation.c.started_at >= start,
            operation.c.started_at < end,
        )
        .order_by(operation.c.id)
        .limit(PAGE)
    )


def _adjust(row: Row[Any], rates: _Rates, model: str | None) -> tuple[Adjustment | None, bool]:
    """What changes about an attempt or a cached answer, and whether it lacks a price by the corrected book."""
    if "cached_from" in row._mapping:
        return _adjust_cached(row, rates, model)
    if row.usage_flag == UNSETTLED:
        return None, False
    billed = _billed(row, rates) if model in (None, row.routed_model) else _UNCHANGED
    cost = _cost(row, rates) if model in (None, row.model) else _UNCHANGED
    if billed.delta is None and cost.delta is None:
        return None, billed.lacks or cost.lacks
    sale, upstream = billed.price, cost.price
    made = Adjustment(
        operation_id=row.operation_id,
        number=row.number,
        started_at=row.operation_started_at,
        currency=row.currency,
        billed_delta=billed.delta,
        cost_delta=cost.delta,
        price_version_from=row.price_version_id,
        price_version_to=sale.id if sale else row.price_version_id,
        override_from=row.price_override_id,
        override_to=sale.override_id if sale else row.price_override_id,
        cost_version_from=row.cost_version_id,
        cost_version_to=upstream.id if upstream else row.cost_version_id,
    )
    return made, billed.lacks or cost.lacks


def _adjust_cached(row: Row[Any], rates: _Rates, model: str | None) -> tuple[Adjustment | None, bool]:
    changes = model in (None, row.routed_model) and rates.corrected(row, "sale", (row.routed_model, ""))
    if not changes:
        return None, False
    used = rates.versions.get(row.price_version_id)
    tier: Any = (used.tier if used is not None else "") or "standard"
    price = rates.at(row).sale(row.routed_model, tier, Payer(row.org_id, row.team_id, row.key_id))
    billed = _changed(row.billed, row.billed_before, cached_answer_charge(price), price)
    if billed.delta is None or price is None:
        return None, billed.lacks
    made = Adjustment(
        operation_id=row.operation_id,
        number=row.number,
        started_at=row.operation_started_at,
        currency=row.currency,
        billed_delta=billed.delta,
        price_version_from=row.price_version_id,
        price_version_to=price.id,
        override_from=row.price_override_id,
        override_to=price.override_id,
    )
    return made, False


class _Changed(NamedTuple):
    delta: Decimal | None
    price: Price | None = None
    """That makes the difference."""
    lacks: bool = False


_UNCHANGED = _Changed(None)


def _billed(row: Row[Any], rates: _Rates) -> _Changed:
    if not row.billable or row.routed_model is None or not rates.corrected(row, "sale", (row.routed_model, "")):
        return _UNCHANGED
    payer = Payer(row.org_id, row.team_id, row.key_id)
    price = rates.at(row).sale(row.routed_model, row.tier, payer)
    return _changed(row.billed, row.billed_before, charge(price, _tokens(row), row.images), price)


def _cost(row: Row[Any], rates: _Rates) -> _Changed:
    """Only where the recorded cost follows from what the ledger has: an upstream's own word of it stays, and so does
    the cost of more tokens than were delivered."""
    if not rates.corrected(row, "cost", (row.model, ""), row.upstream):
        return _UNCHANGED
    used = rates.versions.get(row.cost_version_id)
    unknown = row.cost is None and (row.status == "ok" or _seconds(row) is not None)
    if not unknown and (row.cost is None or used is None or _computed(used, row) != row.cost):
        return _UNCHANGED
    # An attempt may be billed at another tier than its upstream served.
    tier: Any = row.tier if used is None or used.device_hour is not None else used.tier
    price = rates.at(row).cost(row.model, row.upstream, tier)
    return _changed(row.cost, row.cost_before, None if price is None else _computed(price, row), price)


def _changed(recorded: Decimal | None, before: Decimal | None, amount: Decimal | None, price: Price | None) -> _Changed:
    """`before`: the sum of earlier adjustments."""
    known = recorded is not None or before is not None
    if amount is None:
        return _Changed(None, lacks=known)
    delta = EXACT.subtract(amount, EXACT.add(recorded or Decimal(0), before or Decimal(0)))
    return _Changed(delta, price) if delta or not known else _UNCHANGED


def _computed(price: Price, row: Row[Any]) -> Decimal | None:
    if price.device_hour is None:
        return charge(price, _tokens(row), row.images)
    seconds = _seconds(row)
    return None if seconds is None else device_cost(price, seconds)


def _seconds(row: Row[Any]) -> float | None:
    prefill, decode = row.prefill_device_seconds, row.decode_device_seconds
    return None if prefill is None or decode is None else float(prefill + decode)


def _tokens(row: Row[Any]) -> TokenClasses:
    return TokenClasses(**{name: row._mapping[name] for name in TOKEN_CLASSES})
