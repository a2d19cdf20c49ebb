"""Budgets that change while a call is admitted: what refused it a moment ago may not be there any more."""

from typing import Any

import pytest
from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ids import new_id
from billing.leases import Left
from billing.people import Principal
from billing.prices import PriceBook
from billing.tables import budget
from gateway.admission import Admission
from gateway.dispatch import Dispatcher
from gateway.live import Live
from gateway.operation import Operation
from gateway.settings import Settings
from tests.billing import replicas
from tests.gateway.samples import chat_call

ORG, KEY = new_id(), new_id()


async def test_an_unpriced_model_whose_budget_is_removed_meanwhile(
    engine: AsyncEngine, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is admitted, and what it holds of a limit is not forgotten."""
    await replicas.budget(engine, "key", str(KEY), "1")
    await replicas.limit(engine, "org", str(ORG), "concurrent", 1)
    principal = Principal(
        key_id=KEY, org_id=ORG, team_id=None, user_id=None, name="k", expires_at=None, revoked_at=None
    )
    async with replicas.a_replica(engine) as leases:
        ask = leases.left

        async def then_removed(scopes: Any) -> Left:
            left = await ask(scopes)
            if left.money is not None:
                async with engine.begin() as connection:
                    await connection.execute(delete(budget).where(budget.c.unit == "money"))
                leases._rounds._noticed(f"set key {KEY}")
                await replicas.until(lambda: not leases._pool.matching.scopes["key", str(KEY)])
            return left

        monkeypatch.setattr(leases, "left", then_removed)
        admission = Admission(leases, Dispatcher(Live(Settings(**settings))))
        for _ in range(2):
            operation = Operation(principal=principal)
            admitted = await admission.admit(operation, chat_call(), "gratis", PriceBook([]))
            admission.release(admitted.hold)
