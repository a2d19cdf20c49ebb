"""What amounts in the ledger are made of: for each price that was used, how many units of each of its parts.

An attempt's amount is taken apart only where its parts add up to it to the last digit; an answer from the response
cache has no attempt, and one part. What is left (a cost that an upstream reported itself, device time) comes as sums of
their own, so that all rows together are always what the ledger says. Amounts that are unknown (NULL) are in none.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.charge import EXACT
from billing.filters import Filters
from billing.ids import smallest_id
from billing.prices import Book, Price, effective, load_all
from billing.records import TOKEN_CLASSES

ID_SLACK = timedelta(hours=1)
"""An id may be made a little before or after `started_at` is read."""
MILLION = 1_000_000


class Part(NamedTuple):
    """One kind of unit that has a price."""

    name: str
    unit: str
    per: int
    """The price is for so many units."""
    rate: str
    """Field of `Price`."""


CACHED_ANSWER = Part("response_cache", "requests", 1, "per_cached_answer")
PARTS = (
    *(Part(name, "tokens", MILLION, name) for name in TOKEN_CLASSES),
    Part("request", "requests", 1, "per_request"),
    Part("image", "images", 1, "per_image"),
)
"""Of an attempt."""


class Charged(msgspec.Struct, frozen=True, kw_only=True):
    """Units of one part at one price, summed by some dimensions; or amounts that are no units times a price."""

    dimensions: Mapping[str, Any]
    currency: str
    model: str
    """Whose price it is; without one, the model that answered, or empty."""
    tier: str
    part: str
    """The name of a Part, or `device`, `adjustment`, `other`."""
    quantity: Decimal
    unit: str
    """Of `quantity`: tokens, requests, images, seconds (of a device)."""
    unit_price: Decimal | None
    """For `per` units. None: the amount is a sum, in which each was rounded for itself or had no price."""
    list_price: Decimal | None
    """Before a factor of the org, team or key."""
    per: int
    amount: Decimal
    price_version_id: UUID | None
    override_id: UUID | None


DIMENSIONS = {
    "day": "date_trunc('day', o.started_at, 'UTC')",
    "org_id": "o.org_id",
    "team_id": "o.team_id",
    "user_id": "o.user_id",
    "key_id": "o.key_id",
    "tags": "o.tags",
    "upstream": "a.upstream",
}
"""What amounts can be summed by, as SQL. An answer from the response cache has no upstream."""

_ANY = f"({' + '.join(f'a.{name}' for name in TOKEN_CLASSES)}) > 0"
_TOKENS = " + ".join(f"a.{name} * coalesce(p.{name}, 0)" for name in TOKEN_CLASSES)
_IMAGES = "a.images * coalesce(p.per_image, 0)"
_REQUEST = f"CASE WHEN {_ANY} THEN coalesce(p.per_request, 0) ELSE 0 END"
_PRICED = f"(({_TOKENS}) * 0.000001 + {_IMAGES} + {_REQUEST}) * coalesce(f.factor, 1)"
_SECONDS = "(a.prefill_device_seconds + a.decode_device_seconds)::text::numeric"  # as text: the shortest exact decimal

_OF_ATTEMPTS = """
SELECT {select}o.currency, a.tier, coalesce(nullif(p.model, ''), o.model, '') AS model,
       {price} AS price_version_id, {override} AS override_id,
       {counts},
       count(*) FILTER (WHERE s.fits AND {any}) AS request,
       coalesce(sum(a.images) FILTER (WHERE s.fits), 0) AS image,
       sum({seconds}) FILTER (WHERE s.device) AS device_quantity, sum({amount}) FILTER (WHERE s.device) AS device,
       count(*) FILTER (WHERE s.rest) AS other_quantity, sum({amount}) FILTER (WHERE s.rest) AS other
FROM operation o JOIN attempt a ON a.operation_id = o.id
LEFT JOIN price_version p ON p.id = {price}
LEFT JOIN price_version f ON f.id = {override} AND f.factor IS NOT NULL
CROSS JOIN LATERAL (
    SELECT p.id IS NOT NULL AND p.device_hour IS NULL AND {payable} AND {amount} = {priced} AS fits,
           p.device_hour IS NOT NULL AND {seconds} IS NOT NULL AS device
) f1
CROSS JOIN LATERAL (SELECT f1.fits, f1.device, {amount} <> 0 AND NOT f1.fits AND NOT f1.device AS rest) s
WHERE {known} AND {within} AND a.operation_id >= :first AND a.operation_id < :after
GROUP BY {group}o.currency, a.tier, coalesce(nullif(p.model, ''), o.model, ''), {price}, {override}
"""

_OF_CACHED_ANSWERS = """
SELECT {select}o.currency, coalesce(o.model, '') AS model, t.operation_id IS NULL AS cached,
       o.price_version_id, o.price_override_id AS override_id,
       count(*) AS quantity, sum(o.billed - coalesce(t.billed, 0)) AS amount
FROM operation o LEFT JOIN (
    SELECT operation_id, sum(billed) AS billed FROM attempt a
    WHERE a.operation_id >= :first AND a.operation_id < :after GROUP BY operation_id
) t ON t.operation_id = o.id
WHERE o.billed <> coalesce(t.billed, 0) AND {within}
GROUP BY {group}o.currency, coalesce(o.model, ''), t.operation_id IS NULL, o.price_version_id, o.price_override_id
"""

_OF_ADJUSTMENTS = """
SELECT {select}j.currency, coalesce(o.model, '') AS model, coalesce(a.tier, 'standard') AS tier,
       count(DISTINCT (j.operation_id, j.number)) AS quantity, sum(j.{delta}) AS amount
FROM adjustment j JOIN operation o ON o.id = j.operation_id
LEFT JOIN attempt a ON a.operation_id = j.operation_id AND a.number = j.number
    AND a.operation_id >= :first AND a.operation_id < :after
WHERE j.{delta} IS NOT NULL AND {within}
GROUP BY {group}j.currency, coalesce(o.model, ''), coalesce(a.tier, 'standard')
"""


async def charged(
    conn: AsyncConnection,
    book: Book,
    start: datetime,
    end: datetime,
    filters: Filters = Filters(),  # noqa: B008 - frozen
    by: Sequence[str] = (),
) -> AsyncIterator[Charged]:
    """What the operations that started in [start, end) were billed (`sale`), or their attempts cost (`cost`).

    `by`: names of DIMENSIONS to keep apart. Rows stream, so millions need no memory.
    """
    prices = {price.id: price for price in await load_all(conn)}
    condition, parameters = filters.sql()
    parameters |= {
        "start": start,
        "end": end,
        "first": smallest_id(start - ID_SLACK),
        "after": smallest_id(end + ID_SLACK),
    }
    within = f"o.started_at >= :start AND o.started_at < :end AND o.id >= :first AND o.id < :after{condition}"

    async def rows(template: str, without: str = "", **names: str) -> AsyncIterator[RowMapping]:
        kept = {name: "NULL::text" if name == without else DIMENSIONS[name] for name in by}
        select = "".join(f"{sql} AS {name}, " for name, sql in kept.items())
        group = "".join(f"{sql}, " for name, sql in kept.items() if name != without)
        query = text(template.format(select=select, group=group, within=within, **names))
        async with conn.stream(query, parameters) as result:
            async for row in result.mappings():
                yield row

    async for row in rows(_OF_ATTEMPTS, **_columns(book)):
        for each in _parts(row, by, prices.get(row["price_version_id"]), prices.get(row["override_id"])):
            yield each
    if book == "sale":
        async for row in rows(_OF_CACHED_ANSWERS, without="upstream"):
            each = _sum(row, by, "response_cache" if row["cached"] else "other", row["quantity"], row["amount"])
            yield _priced(each, prices.get(row["price_version_id"]), prices.get(row["override_id"]))
    async for row in rows(_OF_ADJUSTMENTS, delta="billed_delta" if book == "sale" else "cost_delta"):
        yield _sum(row, by, "adjustment", row["quantity"], row["amount"])


def _columns(book: Book) -> dict[str, str]:
    counts = ", ".join(f"coalesce(sum(a.{name}) FILTER (WHERE s.fits), 0) AS {name}" for name in TOKEN_CLASSES)
    sale = book == "sale"
    return {
        "amount": "a.billed" if sale else "a.cost",
        "price": "a.price_version_id" if sale else "a.cost_version_id",
        "override": "a.price_override_id" if sale else "NULL::uuid",
        "payable": "a.billable" if sale else "true",
        "known": "o.billed IS NOT NULL" if sale else "a.cost IS NOT NULL",
        "counts": counts,
        "priced": _PRICED,
        "any": _ANY,
        "seconds": _SECONDS,
    }


def _parts(row: RowMapping, by: Sequence[str], price: Price | None, override: Price | None) -> list[Charged]:
    found = []
    charged_at = effective(price, override)
    if price is not None and charged_at is not None:
        for part in PARTS:
            rate, quantity = getattr(charged_at, part.rate), Decimal(row[part.name])
            if rate is None or not quantity:
                continue
            found.append(
                Charged(
                    dimensions={name: row[name] for name in by},
                    currency=row["currency"],
                    model=row["model"],
                    tier=row["tier"],
                    part=part.name,
                    quantity=quantity,
                    unit=part.unit,
                    unit_price=rate,
                    list_price=getattr(price, part.rate),
                    per=part.per,
                    amount=EXACT.divide(EXACT.multiply(quantity, rate), Decimal(part.per)),
                    price_version_id=row["price_version_id"],
                    override_id=row["override_id"],
                )
            )
    if row["device"] is not None:
        found.append(_sum(row, by, "device", row["device_quantity"], row["device"], "seconds"))
    if row["other_quantity"]:
        found.append(_sum(row, by, "other", row["other_quantity"], row["other"]))
    return found


def _priced(each: Charged, price: Price | None, override: Price | None) -> Charged:
    """Answers from the response cache with their price, where they make their amount to the last digit."""
    rate = None if price is None else getattr(effective(price, override), CACHED_ANSWER.rate, None)
    if price is None or rate is None or EXACT.multiply(rate, each.quantity) != each.amount:
        return each
    listed = getattr(price, CACHED_ANSWER.rate)
    return msgspec.structs.replace(each, tier=price.tier or "standard", unit_price=rate, list_price=listed)


def _sum(
    row: RowMapping, by: Sequence[str], part: str, quantity: Decimal | int, amount: Decimal, unit: str = "requests"
) -> Charged:
    return Charged(
        dimensions={name: row[name] for name in by},
        currency=row["currency"],
        model=row["model"],
        tier=row.get("tier") or "standard",
        part=part,
        quantity=Decimal(quantity),
        unit=unit,
        unit_price=None,
        list_price=None,
        per=1,
        amount=amount,
        price_version_id=row.get("price_version_id"),
        override_id=row.get("override_id"),
    )
