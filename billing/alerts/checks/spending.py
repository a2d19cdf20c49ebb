"""A rule over spend against its own past. Baselines are kept for the hour that they are for."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts.detector import (
    HOURS_A_DAY,
    HOURS_A_WEEK,
    LONGEST_HISTORY_WEEKS,
    Baseline,
    baseline,
    between,
    score,
)
from billing.alerts.finding import Finding, Rise
from billing.alerts.kinds import Spike
from billing.alerts.money import amount
from billing.alerts.scopes import RuleScope, usage
from billing.alerts.spikes import HOLD, State, stands_out
from billing.usage_rows import floor

HOUR = timedelta(hours=1)
HISTORY = LONGEST_HISTORY_WEEKS * HOURS_A_WEEK
"""In hours."""

Who = tuple[str, str, str]
"""Kind and id of a scope, and a currency."""


class Usual(NamedTuple):
    hour: datetime
    """The running one."""
    last: Baseline | None
    """Of the hour before it."""
    running: Baseline | None


class Spikes:
    """Finds spikes; remembers what is usual, so that the past is read once an hour and not once a minute."""

    def __init__(self) -> None:
        self._usual: dict[tuple[int, Who], Usual] = {}

    async def check(
        self, conn: AsyncConnection, rule: Spike, scope: RuleScope, now: datetime
    ) -> AsyncIterator[Finding]:
        """Of the sixty minutes before `now`."""
        hour = floor(now, "hour")
        passed = Decimal((now - hour) / HOUR)
        spent: dict[Who, Decimal] = defaultdict(Decimal)
        for row in await usage(conn, scope, hour - HOUR, now, by="hour"):
            # Sums are by the hour: of the one before its end counts, as if it had been even. That is near enough to
            # see whom to look at.
            share = Decimal(1) if row.part == hour else 1 - passed
            spent[scope.kind, row.member, row.currency] += share * _billed(row)
        worth = [who for who, billed in spent.items() if billed >= rule.minimum * Decimal(str(HOLD))]
        usual = await self._learn(conn, rule, scope, hour, worth)
        expected = {
            who: between(last, running, float(passed))
            for who, (_, last, running) in usual.items()
            if last is not None and running is not None
        }
        found = [who for who, baseline_now in expected.items() if _state(rule, spent[who], baseline_now) != "clear"]
        if found:  # seldom: now it is worth to read the ledger
            only = None if scope.kind == "all" else [member for _, member, _ in found]
            rows = await usage(conn, scope, now - HOUR, now, only=only, exact=True)
            exact: dict[Who, Decimal] = {(scope.kind, row.member, row.currency): _billed(row) for row in rows}
            for who in found:
                finding = _judge(rule, who, exact.get(who, Decimal(0)), expected[who], now)
                if finding is not None:
                    yield finding

    async def _learn(
        self, conn: AsyncConnection, rule: Spike, scope: RuleScope, hour: datetime, worth: Sequence[Who]
    ) -> dict[Who, Usual]:
        warm_up = rule.warm_up_days * HOURS_A_DAY
        self._usual = {key: usual for key, usual in self._usual.items() if usual.hour == hour}
        missing = [who for who in worth if (warm_up, who) not in self._usual]
        if missing:
            start = hour - HISTORY * HOUR
            members = None if scope.kind == "all" else [member for _, member, _ in missing]
            rows = await usage(conn, scope, start, hour, by="hour", only=members)
            learned = await asyncio.to_thread(_baselines, rows, scope.kind, start, warm_up)
            for who in missing:
                self._usual[warm_up, who] = Usual(hour, *learned.get(who, (None, None)))
        return {who: self._usual[warm_up, who] for who in worth}


def _baselines(
    rows: Sequence[Row[Any]], kind: str, start: datetime, warm_up: int
) -> dict[Who, tuple[Baseline | None, Baseline | None]]:
    """Of the last whole hour and of the running one."""
    series: dict[Who, np.ndarray[tuple[int], np.dtype[np.float64]]] = defaultdict(lambda: np.zeros(HISTORY))
    for row in rows:
        series[kind, row.member, row.currency][(row.part - start) // HOUR] = max(float(_billed(row)), 0.0)
    return {who: (baseline(hours[:-1], warm_up), baseline(hours, warm_up)) for who, hours in series.items()}


def _state(rule: Spike, spent: Decimal, usual: Baseline) -> State:
    return stands_out(rule, float(rule.minimum), usual, float(spent))


def _judge(rule: Spike, who: Who, spent: Decimal, usual: Baseline, now: datetime) -> Finding | None:
    state = _state(rule, spent, usual)
    if state == "clear":
        return None
    kind, member, currency = who
    expected = Decimal(usual.expected)
    times = f", {spent / expected:.1f} times as much as usual ({amount(expected, currency)})" if expected else ""
    return Finding(
        scope_kind=kind,
        scope_id=member,
        subject=currency,
        holding=state == "holding",
        summary=f"{amount(spent, currency)} spent in the hour up to {now:%H:%M} UTC{times}.",
        details={
            "spent": f"{spent:f}",
            "expected": f"{expected:.6g}",
            "score": round(score(usual, float(spent)), 2),
            "currency": currency,
            "until": now.isoformat(),
        },
        rise=Rise(measure="billed", start=floor(now, "hour") - HOUR, end=now, currency=currency),
    )


def _billed(row: Row[Any]) -> Decimal:
    """What is known of it, with what was adjusted."""
    return (row.billed or Decimal(0)) + (row.billed_adjustment or Decimal(0))
