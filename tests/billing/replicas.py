"""Replicas as the gateway runs them, and what the database says of their leases."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.allowances import LimitKind, ScopeKind
from billing.budgets import Budget, list_budgets, set_budget
from billing.ids import new_id
from billing.leases import Hold, Leases, Need
from billing.limits import set_limit
from billing.notices import Notices
from billing.records import OperationRecord
from tests.billing.samples import an_operation


@asynccontextmanager
async def a_replica(engine: AsyncEngine, name: str = "place.run", currency: str = "USD") -> AsyncIterator[Leases]:
    """Leases that run, with notices that are heard."""
    notices = Notices(engine)
    leases = Leases(engine, name, currency, notices)
    tasks = [asyncio.create_task(notices.run()), asyncio.create_task(leases.run())]
    await until(lambda: notices.healthy)
    try:
        yield leases
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await leases.close()


async def until(true: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - what is waited for happens elsewhere
            await asyncio.sleep(0.01)


async def budget(engine: AsyncEngine, kind: ScopeKind, scope: str, amount: str, **terms: Any) -> UUID:
    terms = {"window": "none", "currency": "USD"} | terms
    async with engine.begin() as conn:
        return await set_budget(conn, kind, scope, limit=Decimal(amount), **terms)


async def limit(engine: AsyncEngine, kind: ScopeKind, scope: str, what: LimitKind, amount: int, **terms: Any) -> UUID:
    async with engine.begin() as conn:
        return await set_limit(conn, kind, scope, what, amount, **terms)


async def admit(leases: Leases, amount: str | None, tokens: int = 0, **scopes: str) -> Hold:
    ids: Any = {kind: [identifier] for kind, identifier in scopes.items()}
    return await admit_to(leases, ids, Need(None if amount is None else Decimal(amount), tokens))


async def admit_to(leases: Leases, scopes: Mapping[ScopeKind, Sequence[str]], need: Need) -> Hold:
    """As the gateway does it: at hand, and where that has no answer by waiting."""
    operation_id = new_id()
    hold = leases.admit_at_hand(operation_id, scopes, need)
    return hold if hold is not None else await leases.admit_waiting(operation_id, scopes, need)


def row(hold: Hold, billed: str | None, **changes: Any) -> OperationRecord:
    """The operation that an admitted call becomes."""
    fields: dict[str, Any] = {"billed": None if billed is None else Decimal(billed), "attempts": []}
    return an_operation(id=hold.operation_id, replica=hold.replica, charges=hold.charges, **fields | changes)


async def budgets_of(engine: AsyncEngine) -> dict[str, Budget]:
    async with engine.connect() as conn:
        return {budget.scope_id: budget for budget in await list_budgets(conn)}


async def wrong_sums(engine: AsyncEngine) -> list[Any]:
    """Windows that are over their hard limit, or whose `leased` is not the sum of their leases."""
    query = text("""
        SELECT b.scope_kind, b.scope_id, b.limit_amount, w.added, w.leased, w.settled,
            coalesce(sum(l.granted - l.settled), 0)
        FROM budget_window w JOIN budget b ON b.id = w.budget_id LEFT JOIN lease l USING (budget_id, starts_at)
        WHERE b.hard AND b.unit = 'money' GROUP BY b.id, w.budget_id, w.starts_at
        HAVING w.leased + w.settled > b.limit_amount + w.added OR w.leased <> coalesce(sum(l.granted - l.settled), 0)
    """)
    async with engine.connect() as conn:
        return list(await conn.execute(query))
