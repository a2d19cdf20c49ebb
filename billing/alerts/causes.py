"""Who made a rise: what each key and each tag has now against what it had at the same time of the days before."""

import statistics
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts.finding import Measure, Rise
from billing.alerts.message import Cause
from billing.breakdown import UsageRow, tag_names, usage_by
from billing.filters import Filters
from billing.tables import operation

NAMED = 3
"""At most so many causes are named."""
LEAST_SHARE = 0.1
"""Of the rise; whoever made less is not named."""
DAYS = (1, 2, 7)
"""Before now: what is usual is the median of these."""
MOST_TAGS = 8
"""Names of tags that are looked at: those that most operations of the scopes carry."""

Item = tuple[str, str]
"""Id and name."""


async def causes_of(conn: AsyncConnection, rise: Rise, scope_kind: str, scope_id: str) -> tuple[Cause, ...]:
    """The keys and tags that made it, those first that it says most about. The scopes themselves are none."""
    scopes: dict[str, str] = dict([(scope_kind, scope_id), *rise.also.items()])
    filters = _filters(scopes)
    found: list[tuple[float, Cause]] = []
    for (identifier, name), share, usual in shares(*await _amounts(conn, rise, filters, "key")):
        found.append((_said(share, usual), Cause("key", name, identifier, share)))
    for tag in await tag_names(conn, rise.start, rise.end, filters, MOST_TAGS):
        for (value, _), share, usual in shares(*await _amounts(conn, rise, filters, f"tag:{tag}")):
            found.append((_said(share, usual), Cause("tag", f"{tag}={value}", f"{tag}={value}", share)))
    found = [each for each in found if each[1].id not in scopes.values() and each[1].share >= LEAST_SHARE]
    found.sort(key=lambda each: (-each[0], each[1].kind, each[1].id))
    return tuple(cause for _, cause in found[:NAMED])


def shares(now: Mapping[Item, float], before: Sequence[Mapping[Item, float]]) -> list[tuple[Item, float, float]]:
    """Of each item that rose: its share of the whole rise, and its usual share of all. Shares are from 0 to 1.

    `before`: amounts of like spans; what is usual is each item's median over them, 0 where it is missing.
    """
    items = {*now, *(item for span in before for item in span)}
    usual = {item: statistics.median([span.get(item, 0.0) for span in before] or [0.0]) for item in items}
    rises = {item: rise for item in items if (rise := now.get(item, 0.0) - usual[item]) > 0}
    whole, all_usual = sum(rises.values()), sum(usual.values())
    return [
        (item, rise / whole, usual[item] / all_usual if all_usual > 0 else 0.0)
        for item, rise in sorted(rises.items(), key=lambda each: (-each[1], each[0]))
    ]


def _said(share: float, usual: float) -> float:
    """How much more of the rise somebody has than of the usual: a tag that everything carries explains nothing."""
    return share - usual


async def _amounts(
    conn: AsyncConnection, rise: Rise, filters: Filters, dimension: str
) -> tuple[dict[Item, float], list[dict[Item, float]]]:
    spans = [(rise.start, rise.end), *(rise.days_before(days) for days in DAYS)]
    found: list[dict[Item, float]] = []
    for start, end in spans:
        amounts: dict[Item, float] = {}
        share = 1.0 if start == rise.start else rise.passed
        for row in await usage_by(conn, [dimension], start, end, filters, only=_only(rise)):
            name = row.by[dimension]
            if name is not None and rise.currency in (None, row.currency):
                item = row.ids.get(dimension) or name, name
                amounts[item] = amounts.get(item, 0.0) + share * float(_measured(row, rise.measure))
        found.append(amounts)
    return found[0], found[1:]


def _only(rise: Rise) -> ColumnElement[bool] | None:
    """Of which operations the measure is, where no sums hold it."""
    if rise.measure != "slow":
        return None
    return (operation.c.status == "ok") & (operation.c.total_seconds >= rise.seconds)


def _measured(row: UsageRow, measure: Measure) -> Decimal:
    if measure == "billed":
        return row.billed or Decimal(0)
    if measure == "failed":
        return Decimal(row.failed)
    if measure == "loss":
        return max(-(row.margin or Decimal(0)), Decimal(0))
    if measure == "unpriced":
        return Decimal(row.billed_unknown)
    if measure == "slow":
        return Decimal(row.operations)
    return Decimal(row.tokens.input_fresh + row.tokens.input_cache_write)


def _filters(scopes: Mapping[str, str]) -> Filters:
    """What has all of `scopes`, kind -> id, as `usage_by` takes it."""
    given: dict[str, Any] = {}
    for kind, identifier in scopes.items():
        if kind == "model":
            given["model"] = identifier
        elif kind == "tag":
            name, _, value = identifier.partition("=")
            given["tag"] = (name, value)
        elif kind != "all":
            given[f"{kind}_id"] = UUID(identifier)
    return Filters(**given)
