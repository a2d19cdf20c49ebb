"""Lists of the admin API: all come in pages, and pages show everything once, in their order."""

import base64
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import create_async_engine

from billing.alerts.channels import set_channel
from billing.alerts.silences import silence
from billing.budgets import set_budget
from billing.ids import new_id
from billing.tables import alert, budget_window, lease
from tests.gateway.administering import House, a_house

NOW = datetime(2026, 11, 26, 14, 30, tzinfo=UTC)

WHOLE = {
    "/usage": "a report: a page of it would have no total",
    "/forecast": "a report of one month, a row for each amount and currency",
    "/margins": "a report, like usage",
    "/operations/{operation_id}": "one operation, with its attempts",
    "/invoices/{invoice_id}": "one invoice, with its lines",
    "/alerts/{alert_id}": "one alert, with what was sent to each channel",
    "/me": "one caller, with their rights",
}
"""What answers with a collection that does not come in pages, and why."""


@pytest.fixture
async def house(database_url: str, tmp_path: Path) -> AsyncIterator[House]:
    engine = create_async_engine(database_url)
    yield await a_house(engine, database_url, tmp_path)
    await engine.dispose()


async def pages(client: httpx.AsyncClient, path: str, limit: int, **params: Any) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    cursor: str | None = None
    while not found or cursor is not None:
        asked = params | {"limit": limit} | ({} if cursor is None else {"cursor": cursor})
        answer = await client.get(path, params=asked)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["data"])
        cursor = answer.json()["next_cursor"]
    return found


def properties(described: dict[str, Any], schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if "$ref" in schema:
        schema = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    found: dict[str, dict[str, Any]] = schema.get("properties", {})
    return found


async def test_every_list_that_is_described_comes_in_pages(house: House) -> None:
    async with house.client("owner") as client:
        described = (await client.get("/openapi.json")).json()
    lists: set[str] = set()
    others: set[str] = set()
    for path, operations in described["paths"].items():
        answer = operations.get("get", {}).get("responses", {}).get("200", {}).get("content", {})
        fields = properties(described, answer.get("application/json", {}).get("schema", {}))
        if not any(field.get("type") == "array" for field in fields.values()):
            continue
        paged = {"cursor", "limit"} <= {each["name"] for each in operations["get"].get("parameters", [])}
        assert paged == ("next_cursor" in fields), path
        (lists if paged else others).add(path)
    assert others == set(WHOLE)
    assert {"/orgs", "/alerts", "/alert-rules", "/alert-channels", "/silences", "/leases"} <= lists


async def test_alerts_are_shown_newest_first_also_those_that_opened_at_the_same_time(house: House) -> None:
    rows: list[dict[str, Any]] = [
        {"id": new_id(), "rule_id": new_id(), "kind": "latency", "scope_kind": "all", "scope_id": "", "subject": "",
         "level": 0, "summary": str(number), "details": {}, "opened_at": NOW - timedelta(microseconds=number // 5),
         "updated_at": NOW, "resolved_at": NOW if number % 3 == 0 else None}
        for number in range(12)
    ]  # fmt: skip
    async with house.engine.begin() as conn:
        await conn.execute(insert(alert), rows)
    newest = sorted(rows, key=lambda row: (row["opened_at"], row["id"]), reverse=True)
    order = [row["summary"] for row in newest]
    still_open = [row["summary"] for row in newest if row["resolved_at"] is None]
    async with house.client("reader") as client:
        for limit in (1, 2, 5, 12, 100):
            found = await pages(client, "/alerts", limit)
            assert [each["summary"] for page in found for each in page] == order
            assert [len(page) for page in found[:-1]] == [limit] * (len(found) - 1) and found[-1]
        found = await pages(client, "/alerts", 3, open_only=True)
        assert [each["summary"] for page in found for each in page] == still_open and len(found) == 3

        first = (await client.get("/alerts", params={"limit": 4})).json()
        async with house.engine.begin() as conn:  # what opens meanwhile moves nothing
            await conn.execute(insert(alert), [rows[0] | {"id": new_id(), "opened_at": NOW + timedelta(hours=1)}])
        rest = (await client.get("/alerts", params={"cursor": first["next_cursor"]})).json()
        assert [each["summary"] for each in first["data"] + rest["data"]] == order
        for wrong in ("", "x", f"{NOW.isoformat()} x", f"0001-01-01T00:00:00+23:59 {rows[0]['id']}"):
            cursor = base64.urlsafe_b64encode(wrong.encode()).decode()
            answer = await client.get("/alerts", params={"cursor": cursor})
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_cursor", wrong


async def test_channels_silences_and_leases_come_in_pages(house: House) -> None:
    names = ["Ops", "hook", "mail", "ops", "ops.2"]
    async with house.engine.begin() as conn:
        for name in reversed(names):
            await set_channel(conn, name, "webhook", "env:HOOK")
        until = datetime.now(UTC) + timedelta(days=1)
        quiet = [str(await silence(conn, until - timedelta(hours=n % 2))) for n in range(5)]
        budget = await set_budget(conn, "org", house.org, "none", Decimal(9), currency="USD")
        await conn.execute(insert(budget_window).values(budget_id=budget, starts_at=NOW, settled=0))
        taken = [{"budget_id": budget, "starts_at": NOW, "replica": f"{name}.1", "granted": 1} for name in "cabed"]
        await conn.execute(insert(lease), taken)
    async with house.client("reader") as client:
        for limit in (2, 5, 100):
            found = await pages(client, "/alert-channels", limit)
            assert [each["name"] for page in found for each in page] == names
            found = await pages(client, "/silences", limit)
            assert [each["id"] for page in found for each in page] == quiet
            found = await pages(client, "/leases", limit)
            assert [each["replica"] for page in found for each in page] == [f"{name}.1" for name in "abcde"]
