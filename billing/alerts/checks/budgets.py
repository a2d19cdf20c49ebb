"""Rules over budgets: a share of one is used up; one will be over before its window ends."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts.finding import Finding, Rise
from billing.alerts.kinds import BudgetProjection, BudgetShare
from billing.alerts.money import amount, percent
from billing.alerts.scopes import RuleScope
from billing.budgets import Budget, list_budgets
from billing.usage_rows import floor

HOLD = Decimal("0.95")
"""Of a limit: a projection that falls below it is over."""
DAY = timedelta(days=1)


async def budget_share(
    conn: AsyncConnection, rule: BudgetShare, scope: RuleScope, now: datetime
) -> AsyncIterator[Finding]:
    async for budget, limit in _budgets(conn, scope):
        used = budget.settled / limit
        reached = [share for share in rule.shares if used >= share]
        if reached:
            yield Finding(
                scope_kind=budget.scope_kind,
                scope_id=budget.scope_id,
                subject=_window(budget),
                level=len(reached) - 1,
                summary=f"{percent(used)} of the {_name(budget)} is used up: {amount(budget.settled, budget.currency)}"
                f" of {amount(limit, budget.currency)}{_until(budget)}.",
                details=_details(budget, limit) | {"share": float(used), "reached": float(reached[-1])},
                rise=_rise(budget, now),
            )


async def budget_projection(
    conn: AsyncConnection, rule: BudgetProjection, scope: RuleScope, now: datetime
) -> AsyncIterator[Finding]:
    async for budget, limit in _budgets(conn, scope):
        if budget.resets_at is None or budget.settled >= limit or not budget.settled:
            continue
        passed = (now - budget.starts_at) / (budget.resets_at - budget.starts_at)
        if passed < rule.after_share:
            continue
        projected = budget.settled / Decimal(passed)
        if projected >= HOLD * limit:
            over = budget.starts_at + (now - budget.starts_at) * float(limit / budget.settled)
            yield Finding(
                scope_kind=budget.scope_kind,
                scope_id=budget.scope_id,
                subject=_window(budget),
                holding=projected < limit,
                summary=f"Going on like this, the {_name(budget)} of {amount(limit, budget.currency)} is over by"
                f" {over:%Y-%m-%d %H:%M} UTC: {amount(budget.settled, budget.currency)} is spent,"
                f" {amount(projected, budget.currency)} would be by its end.",
                details=_details(budget, limit) | {"projected": f"{projected:f}", "over_at": over.isoformat()},
                rise=_rise(budget, now),
            )


async def _budgets(conn: AsyncConnection, scope: RuleScope) -> AsyncIterator[tuple[Budget, Decimal]]:
    """Those that the rule is about, with what may be spent in their windows; none where that is nothing."""
    for budget in await list_budgets(conn):
        limit = budget.limit_amount + budget.rolled_over
        if limit > 0 and scope.holds(budget.scope_kind, budget.scope_id):
            yield budget, limit


def _window(budget: Budget) -> str:
    """A new window is another alert."""
    return f"{budget.id} {budget.starts_at:%Y-%m-%dT%H:%MZ}"


def _name(budget: Budget) -> str:
    also = "".join(f" with {kind} {identifier}" for kind, identifier in budget.also.items())
    return f"{'whole' if budget.window == 'none' else budget.window} budget{also}"


def _until(budget: Budget) -> str:
    return "" if budget.resets_at is None else f"; it starts anew {budget.resets_at:%Y-%m-%d %H:%M} UTC"


def _details(budget: Budget, limit: Decimal) -> dict[str, str | int | float | None]:
    return {
        "budget_id": str(budget.id),
        "window": budget.window,
        "limit": f"{limit:f}",
        "settled": f"{budget.settled:f}",
        "currency": budget.currency,
        "hard": "yes" if budget.hard else "no",
    }


def _rise(budget: Budget, now: datetime) -> Rise:
    """The last day, or what there is of the window."""
    start = floor(max(budget.starts_at.astimezone(UTC), now - DAY), "hour")
    end = max(now, start + timedelta(minutes=1))
    return Rise(measure="billed", start=start, end=end, currency=budget.currency, also=budget.also)
