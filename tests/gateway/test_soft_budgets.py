"""Soft budgets through the whole gateway: they count and never refuse."""

from decimal import Decimal

from billing.budgets import list_budgets, set_budget
from tests.gateway.running import Gateway


async def test_a_soft_budget_counts_what_was_charged_and_refuses_nothing(gateway: Gateway) -> None:
    async with gateway.engine.begin() as conn:
        await set_budget(conn, "key", gateway.people.key, "day", Decimal("0.0001"), currency="USD", hard=False)
    for _ in range(2):
        assert (await gateway.chat()).status_code == 200
    rows = await gateway.rows(2)
    assert rows[0]["billed"] > 0
    async with gateway.engine.connect() as conn:
        (budget,) = await list_budgets(conn)
    assert budget.settled == rows[0]["billed"] + rows[1]["billed"] > budget.limit_amount
    assert budget.leased == 0  # a soft budget is not leased from


async def test_an_unpriced_model_is_served_under_a_soft_budget(gateway: Gateway) -> None:
    async with gateway.engine.begin() as conn:
        await set_budget(conn, "key", gateway.people.key, "day", Decimal(1), currency="USD", hard=False)
    assert (await gateway.chat(model="gratis")).status_code == 200
    assert (await gateway.row())["billed"] is None
