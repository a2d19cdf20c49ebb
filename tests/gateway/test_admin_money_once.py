"""Money is moved once, however often the admin API is told to with one Idempotency-Key."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Table, func, select
from sqlalchemy.ext.asyncio import create_async_engine

from billing import settlements
from billing.copying import copy
from billing.ids import smallest_id
from billing.records import TokenClasses
from billing.tables import adjustment, budget, invoice, price_version, wallet_entry
from tests.billing.replicas import a_replica, admit, row
from tests.billing.samples import an_attempt, an_operation
from tests.gateway.administering import House, a_house


@pytest.fixture
async def house(database_url: str, tmp_path: Path) -> AsyncIterator[House]:
    engine = create_async_engine(database_url, pool_size=10)
    yield await a_house(engine, database_url, tmp_path)
    await engine.dispose()


async def repeated(house: House, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The one answer to a write that is sent twice at once, and a third time."""
    async with house.client("admin", **{"idempotency-key": f"{path} {body}"}) as client:
        at_once = await asyncio.gather(client.post(path, json=body), client.post(path, json=body))
        answers = [*at_once, await client.post(path, json=body)]
    assert all(answer.is_success for answer in answers), answers[0].text
    assert len({(answer.status_code, answer.content) for answer in answers}) == 1
    assert sorted(answer.headers.get("idempotency-replayed", "") for answer in answers) == ["", "true", "true"]
    found: dict[str, Any] = answers[0].json()
    return found


async def count(house: House, table: Table) -> int:
    async with house.engine.connect() as conn:
        return (await conn.execute(select(func.count()).select_from(table))).scalar_one()


async def entries(house: House) -> list[tuple[str, Decimal]]:
    async with house.engine.connect() as conn:
        rows = await conn.execute(select(wallet_entry).order_by(wallet_entry.c.id))
        return [(each.kind, each.amount) for each in rows]


async def call(house: House, at: datetime, billed: str, price_version_id: UUID | None = None) -> None:
    """An answer with 1,000 tokens of prompt, in the ledger."""
    tokens = TokenClasses(input_fresh=1000)
    amounts: dict[str, Any] = {"billed": Decimal(billed), "cost": None}
    tried = an_attempt(
        model="tiny",
        started_at=at,
        tokens=tokens,
        usage_source="upstream",
        price_version_id=price_version_id,
        **amounts,
    )
    whose = {"org_id": house.org, "team_id": house.team, "user_id": house.user, "key_id": house.key}
    made = an_operation(id=smallest_id(at), started_at=at, model="tiny", attempts=[tried], **whose, **amounts)
    async with house.engine.begin() as conn:
        await copy(conn, [made])


async def test_what_is_done_to_a_wallet_is_done_once(house: House) -> None:
    terms = {"scope_kind": "team", "scope_id": str(house.team), "currency": "USD"}
    place = f"/wallets/{(await repeated(house, '/wallets', terms))['id']}"
    assert await count(house, budget) == 1
    assert Decimal((await repeated(house, f"{place}/top-up", {"amount": "10"}))["balance"]) == 10
    async with a_replica(house.engine, "a.1") as leases:
        hold = await admit(leases, "6", team=str(house.team))
        leases.settle(hold, Decimal(4), 0)
        async with house.engine.begin() as conn:
            await settlements.settle(conn, [row(hold, "4")])
    for path, body, balance in (
        ("refund", {"amount": "1.5"}, "7.5"),
        ("adjust", {"amount": "-2", "note": "a fee"}, "5.5"),
        ("adjust", {"amount": "0.5", "note": "too much of it"}, "6"),
        ("close", {"note": "the contract ended"}, "0"),
    ):
        assert Decimal((await repeated(house, f"{place}/{path}", body))["balance"]) == Decimal(balance), path
    assert await entries(house) == [
        ("top_up", 10), ("capture", -4), ("refund", Decimal("1.5")), ("adjustment", -2),
        ("adjustment", Decimal("0.5")),
        ("adjustment", -4), ("adjustment", Decimal("-1.5")), ("adjustment", Decimal("-0.5")),  # each credit's rest
    ]  # fmt: skip


async def test_a_month_is_invoiced_and_voided_once(house: House) -> None:
    month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0) - timedelta(days=2)
    await call(house, month, "2")
    made = await repeated(house, "/invoices", {"org_id": str(house.org), "month": f"{month:%Y-%m}", "issuer": "Us"})
    voided = await repeated(house, f"/invoices/{made['id']}/void", {"reason": "wrong address"})
    assert (made["voided_at"], voided["void_reason"]) == (None, "wrong address")
    again = await repeated(house, "/invoices", {"org_id": str(house.org), "month": f"{month:%Y-%m}", "issuer": "Ltd"})
    assert await count(house, invoice) == 2 and again["number"] == made["number"] + 1, "no number was passed over"


async def test_prices_are_entered_and_calls_rerated_once(house: House) -> None:
    now = datetime.now(UTC)
    price = {"book": "sale", "model": "tiny", "currency": "USD"}
    for amount, minutes in (("3", 90), ("4", 60)):
        since = (now - timedelta(minutes=minutes)).isoformat()
        await repeated(house, "/prices", {"prices": [price | {"input_fresh": amount, "effective_at": since}]})
    async with house.engine.connect() as conn:
        versions = (await conn.execute(select(price_version).order_by(price_version.c.id))).all()
    assert [each.input_fresh for each in versions] == [3, 4]
    await call(house, now - timedelta(minutes=30), "0.003", versions[0].id)
    start, end = (now - timedelta(minutes=45)).isoformat(), now.isoformat()
    done = await repeated(house, "/prices/rerate", {"start": start, "end": end, "reason": "typo"})
    assert done["adjusted"] == 1 and Decimal(done["billed_delta"]["USD"]) == Decimal("0.001")
    async with house.engine.connect() as conn:
        [made] = (await conn.execute(select(adjustment))).all()
    assert made.billed_delta == Decimal("0.001") and made.reason == "typo"
