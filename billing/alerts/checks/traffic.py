"""Rules over what operations came to in the last whole hour and the running one: cache, prices, errors, margin."""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import prices
from billing.alerts.finding import Finding, Rise
from billing.alerts.kinds import CacheHitRate, ErrorRate, Margin, UnpricedModel
from billing.alerts.money import amount, percent
from billing.alerts.scopes import RuleScope, usage
from billing.usage_rows import floor

HOUR = timedelta(hours=1)
HOLD = 0.8
"""Of what opens an alert, what keeps it open."""
USUAL_DAYS = 7


async def cache_hit_rate(
    conn: AsyncConnection, rule: CacheHitRate, scope: RuleScope, now: datetime
) -> AsyncIterator[Finding]:
    start = floor(now, "hour") - HOUR
    rows = await usage(conn, scope, start, now)
    busy = [row.member for row in rows if _prompt(row) >= rule.minimum_tokens]
    if not busy:
        return
    only = None if scope.kind == "all" else busy
    past = await usage(conn, scope, start - timedelta(days=USUAL_DAYS), start, only=only)
    usual_rates = {(row.member, row.currency): row.input_cached / _prompt(row) for row in past if _prompt(row)}
    for row in rows:
        usual = usual_rates.get((row.member, row.currency), 0.0)
        if _prompt(row) < rule.minimum_tokens or usual < rule.minimum_rate:
            continue
        rate = row.input_cached / _prompt(row)
        gone = 1 - float(rate) / float(usual)
        if gone >= HOLD * rule.fall:
            yield Finding(
                scope_kind=scope.kind,
                scope_id=row.member,
                subject=row.currency,
                holding=gone < rule.fall,
                summary=f"{percent(float(rate))} of the prompt tokens since {start:%H:%M} UTC came from a cache; over"
                f" the {USUAL_DAYS} days before it were {percent(float(usual))}.",
                details={"rate": float(rate), "usual_rate": float(usual), "prompt_tokens": _prompt(row)},
                rise=Rise(measure="fresh_tokens", start=start, end=now),
            )


async def unpriced_model(
    conn: AsyncConnection, rule: UnpricedModel, scope: RuleScope, now: datetime
) -> AsyncIterator[Finding]:
    start = floor(now, "hour") - HOUR
    book = await prices.load(conn)
    for row in await usage(conn, scope, start, now, by="model"):
        if row.billed_unknown and row.part and book.sale(row.part) is None:
            yield Finding(
                scope_kind=scope.kind,
                scope_id=row.member,
                subject=row.part,
                summary=f"The model {row.part} has no price: {row.billed_unknown} operations since {start:%H:%M} UTC"
                " are billed as unknown. Give it a price; `farthing prices` says how.",
                details={"model": row.part, "operations": row.billed_unknown, "currency": row.currency},
                rise=Rise(measure="unpriced", start=start, end=now, also={"model": row.part}),
            )


async def error_rate(conn: AsyncConnection, rule: ErrorRate, scope: RuleScope, now: datetime) -> AsyncIterator[Finding]:
    start = floor(now, "hour") - HOUR
    for row in await usage(conn, scope, start, now):
        asked = row.operations - row.refused - row.invalid
        if asked < rule.minimum_operations or not row.failed or row.failed < HOLD * rule.share * asked:
            continue
        share = row.failed / asked
        yield Finding(
            scope_kind=scope.kind,
            scope_id=row.member,
            subject=row.currency,
            holding=share < rule.share,
            summary=f"{row.failed} of {asked} operations since {start:%H:%M} UTC ({percent(share)}) failed at the"
            " upstream.",
            details={"failed": row.failed, "operations": asked, "share": share},
            rise=Rise(measure="failed", start=start, end=now),
        )


async def margin(conn: AsyncConnection, rule: Margin, scope: RuleScope, now: datetime) -> AsyncIterator[Finding]:
    start = floor(now, "hour") - (rule.hours - 1) * HOUR
    for row in await usage(conn, scope, start, now):
        if row.margin is None or row.margin >= 0:
            continue
        loss = -row.margin
        if loss >= rule.minimum * Decimal(HOLD):
            yield Finding(
                scope_kind=scope.kind,
                scope_id=row.member,
                subject=row.currency,
                holding=loss < rule.minimum,
                summary=f"Over the last {rule.hours} hours {amount(loss, row.currency)} more was paid than billed.",
                details={"margin": f"{row.margin:f}", "hours": rule.hours, "currency": row.currency},
                rise=Rise(measure="loss", start=start, end=now, currency=row.currency),
            )


def _prompt(row: Row[Any]) -> int:
    return int(row.input_fresh + row.input_cached + row.input_cache_write)
