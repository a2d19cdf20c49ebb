"""Money through the admin API: prices, budgets, wallets, usage, exports and invoices, each seen by whom it may be."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from billing.copying import copy
from billing.ids import smallest_id
from billing.records import OperationRecord
from gateway.admin import exports
from tests.billing.samples import an_attempt, an_operation
from tests.gateway.administering import House, a_house


@pytest.fixture
async def house(database_url: str, tmp_path: Path) -> AsyncIterator[House]:
    engine = create_async_engine(database_url)
    yield await a_house(engine, database_url, tmp_path)
    await engine.dispose()


PRICE = {"book": "sale", "model": "tiny", "currency": "USD", "input_fresh": "3", "output_text": "15"}


async def test_prices_are_shown_before_they_are_entered(house: House) -> None:
    async with house.client("admin") as client:
        for path, kinds in (("/prices/preview", ["new"]), ("/prices", ["new"]), ("/prices", ["same"])):
            answer = await client.post(path, json={"prices": [PRICE]})
            assert answer.status_code == 200, answer.text
            assert [change["kind"] for change in answer.json()["changes"]] == kinds
        [listed] = (await client.get("/prices")).json()["data"]
        assert listed["input_fresh"] == "3" and listed["source"] == "operator"
        wrong = await client.post("/prices", json={"prices": [PRICE | {"currency": "EUR"}]})
        assert wrong.status_code == 400 and "this book is in USD" in wrong.json()["error"]["message"]
        start = datetime.now(UTC) - timedelta(days=1)
        body = {"start": start.isoformat(), "end": datetime.now(UTC).isoformat(), "reason": "typo", "dry_run": True}
        assert (await client.post("/prices/rerate", json=body)).json()["adjusted"] == 0
        [entry] = (await client.get("/audit?noun=price")).json()["data"]
        assert entry["actor"].startswith("administrator:") and entry["after"]["model"] == "tiny"


async def test_a_wallet_is_filled_and_corrected(house: House) -> None:
    async with house.client("org admin") as client:
        terms = {"scope_kind": "team", "scope_id": str(house.team), "currency": "USD"}
        wallet = (await client.post("/wallets", json=terms)).json()
        place = f"/wallets/{wallet['id']}"
        assert (await client.post(f"{place}/top-up", json={"amount": "10.50", "note": "paid"})).status_code == 200
        assert (await client.post(f"{place}/adjust", json={"amount": "-0.25", "note": "fee"})).status_code == 200
        too_much = await client.post(f"{place}/adjust", json={"amount": "-100", "note": "fee"})
        assert too_much.status_code == 400 and "cannot be taken" in too_much.json()["error"]["message"]
        never = await client.post(f"{place}/refund", json={"amount": "1"})
        assert never.status_code == 400 and "calls were charged 0" in never.json()["error"]["message"]
        found = (await client.post(f"{place}/top-up", json={"amount": "1"})).json()
        assert Decimal(found["balance"]) == Decimal("11.25")
        first = (await client.get(f"{place}/entries?limit=2")).json()
        rest = (await client.get(f"{place}/entries", params={"cursor": first["next_cursor"]})).json()
        assert [each["kind"] for each in first["data"] + rest["data"]] == ["top_up", "adjustment", "top_up"]
        assert all("token fat-" in each["actor"] for each in first["data"])
        assert (await client.get("/wallets")).json()["data"][0]["id"] == wallet["id"]
    async with house.client("admin") as client:
        other = {"scope_kind": "org", "scope_id": str(house.other_org), "currency": "USD"}
        foreign = (await client.post("/wallets", json=other)).json()
    async with house.client("org admin") as client:
        assert (await client.get(f"/wallets/{foreign['id']}")).status_code == 404
        assert (await client.post(f"/wallets/{foreign['id']}/top-up", json={"amount": "1"})).status_code == 404
        both = terms | {"also": {"org": str(house.other_org)}}
        assert (await client.post("/wallets", json=both)).status_code == 404
        assert (await client.post(f"/wallets/{foreign['id']}/close", json={"note": "x"})).status_code == 404
        closed = (await client.post(f"{place}/close", json={"note": "over"})).json()
        assert Decimal(closed["balance"]) == 0 and closed["closed_at"]
        late = await client.post(f"{place}/top-up", json={"amount": "1"})
        assert late.status_code == 400 and "was closed at" in late.json()["error"]["message"]
        assert (await client.post("/wallets", json=terms)).json()["id"] == wallet["id"]


@pytest.mark.parametrize(
    ("method", "path", "terms"),
    [
        ("PUT", "/budgets", {"window": "month", "limit_amount": "1", "currency": "USD"}),
        ("PUT", "/limits", {"kind": "requests", "limit": 1}),
        ("POST", "/wallets", {"currency": "USD"}),
        ("PUT", "/alert-rules", {"kind": "latency"}),
    ],
)
async def test_nothing_hangs_on_a_role_which_no_call_is_counted_under(
    house: House, method: str, path: str, terms: dict[str, Any]
) -> None:
    scopes: list[dict[str, Any]] = [{"scope_kind": "model", "scope_id": role} for role in ("auto", "small", "large")]
    if path != "/alert-rules":
        scopes.append({"scope_kind": "team", "scope_id": str(house.team), "also": {"model": "large"}})
    async with house.client() as client:
        for scope in scopes:
            refused = await client.request(method, path, json=scope | terms)
            assert refused.status_code == 400, refused.text
            assert "only says who shall answer; name the model itself" in refused.json()["error"]["message"]
        found = await client.request(method, path, json={"scope_kind": "model", "scope_id": "tiny"} | terms)
        assert found.is_success, found.text


def call(house: House, at: datetime, *, mine: bool, billed: str) -> OperationRecord:
    """In the house's organisation by its user, or in the other one."""
    amounts = {"billed": Decimal(billed), "cost": Decimal("0.5")}
    whose = {"org_id": house.org, "team_id": house.team, "user_id": house.user, "key_id": house.key}
    others = {"org_id": house.other_org, "key_id": house.other_key}
    return an_operation(
        **(whose if mine else others),
        **amounts,
        id=smallest_id(at),
        started_at=at,
        model="tiny",
        attempts=[an_attempt(model="tiny", started_at=at, price_version_id=None, **amounts)],
    )


async def spent(house: House) -> dict[str, str]:
    """A call of each organisation; the period that has both."""
    now = datetime.now(UTC)
    async with house.engine.begin() as conn:
        earlier = now - timedelta(seconds=1)
        await copy(conn, [call(house, now, mine=True, billed="2"), call(house, earlier, mine=False, billed="7")])
    return {"start": (now - timedelta(hours=2)).isoformat(), "end": (now + timedelta(hours=1)).isoformat()}


@pytest.mark.parametrize(
    ("who", "billed", "cost"),
    [("reader", "9", "1.0"), ("org reader", "2", "0.5"), ("org admin", "2", "0.5"), ("member", "2", None)],
)
async def test_each_sees_the_usage_that_is_theirs(house: House, who: str, billed: str, cost: str | None) -> None:
    period = await spent(house)
    async with house.client(who) as client:
        answer = await client.get("/usage", params=period | {"by": "model"})
        assert answer.status_code == 200, answer.text
        [row] = answer.json()["rows"]
        assert Decimal(row["billed"]) == Decimal(billed)
        assert (row["cost"] is None) if cost is None else (Decimal(row["cost"]) == Decimal(cost))
        elsewhere = await client.get("/usage", params=period | {"by": "model", "org_id": str(house.other_org)})
        assert elsewhere.status_code == (200 if who == "reader" else 404)
        if who == "member":
            assert (await client.get("/exports/usage", params=period)).status_code == 403
            return
        lines = (await client.get("/exports/usage", params=period)).text.splitlines()
        assert len(lines) == (3 if who == "reader" else 2)
        assert (await client.get("/forecast")).json()["months"][0]["currency"] == "USD"
        focus = await client.get("/exports/focus", params=period | {"format": "csv"})
        assert focus.headers["content-disposition"] == 'attachment; filename="focus-billed.csv"'
        assert len(focus.text.splitlines()) > 1


async def test_slow_readers_of_exports_leave_the_database_to_others(house: House) -> None:
    period = await spent(house)
    async with house.client("reader") as client:
        for _ in range(exports.AT_ONCE):
            await exports.RUNNING.acquire()
        refused = await client.get("/exports/usage", params=period)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "10"
        exports.RUNNING.release()
        for _ in range(2):
            assert (await client.get("/exports/focus", params=period)).status_code == 200, "each ends with its reader"
        for _ in range(exports.AT_ONCE - 1):
            exports.RUNNING.release()


async def test_a_report_that_makes_no_sense_is_refused_before_it_begins(house: House) -> None:
    period = await spent(house)
    async with house.client("reader") as client:
        for path, params in (
            ("/usage", period | {"by": "colour"}),
            ("/usage", {"start": period["end"], "end": period["start"], "by": "model"}),
            ("/usage", period | {"by": "model", "tag": "x"}),
            ("/usage", {"start": "2026-11-01T00:00:00", "end": "2026-12-01T00:00:00", "by": "model"}),
            ("/usage", period | {"by": "model", "time_zone": "Mars"}),
            ("/exports/usage", period | {"format": "xls"}),
            ("/exports/focus", period | {"start": "1970-01-01T00:00:00Z"}),
            ("/exports/focus", period | {"end": "9999-12-31T00:00:00Z"}),
            ("/margins", period | {"by": "colour"}),
        ):
            answer = await client.get(path, params=params)
            assert answer.status_code == 400 and answer.json()["error"]["message"], (path, answer.text)


async def test_an_invoice_of_last_month(house: House) -> None:
    this_month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    at = this_month - timedelta(days=2)
    async with house.engine.begin() as conn:
        await copy(conn, [call(house, at, mine=True, billed="2.005")])
    body = {"org_id": str(house.org), "month": f"{at:%Y-%m}", "issuer": "Farthing Ltd"}
    async with house.client("admin", **{"idempotency-key": "invoice"}) as client:
        made = await client.post("/invoices", json=body)
        assert made.status_code == 201, made.text
        again = await client.post("/invoices", json=body)
        assert again.content == made.content and again.headers["idempotency-replayed"] == "true"
        place = f"/invoices/{made.json()['id']}"
        assert (await client.get(f"{place}/pdf")).content.startswith(b"%PDF")
        assert made.json()["label"] in (await client.get(f"{place}/csv")).text
    async with house.client("org admin") as client:
        assert (await client.post(f"{place}/void", json={"reason": "too much"})).status_code == 403
        assert (await client.get(f"{place}/pdf")).content.startswith(b"%PDF"), "an org reads its own"
    async with house.client("admin") as client:
        assert (await client.post("/invoices", json=body)).status_code == 400
        assert (await client.post(f"{place}/void", json={"reason": "wrong address"})).json()["voided_at"]
    async with house.client("org reader") as client:
        assert [each["void_reason"] for each in (await client.get("/invoices")).json()["data"]] == ["wrong address"]


async def test_a_bill_is_compared_and_lost_leases_are_freed(house: House) -> None:
    now = datetime.now(UTC)
    async with house.engine.begin() as conn:
        await copy(conn, [call(house, now, mine=True, billed="2")])
    columns = {"day": "d", "model": "m", "cost": "c", "currency": "u"}
    bill = {"upstream": "engine", "columns": columns, "csv": f"d,m,c,u\n{now:%Y-%m-%d},tiny,7,USD\n"}
    async with house.client("reader") as client:
        found = await client.post("/reconciliation", json=bill)
        assert found.status_code == 200, found.text
        [difference] = found.json()["differences"]
        assert (difference["what"], difference["bill"]) == ("cost", "7")
        for wrong in ({"csv": "x"}, {"csv": 'd,m,c,u\n"' + "x" * 200_000}, {"month": "soon"}, {"tolerance": "-1"}):
            answer = await client.post("/reconciliation", json=bill | wrong)
            assert answer.status_code == 400, (list(wrong), answer.text)
        assert (await client.get("/leases")).json() == {"data": [], "next_cursor": None}
    async with house.client("admin") as client:
        answer = await client.post("/leases/free", json={"replica": "gone.1"})
        assert answer.status_code == 400 and "has no lease" in answer.json()["error"]["message"]


async def test_nobody_lifts_what_bounds_their_own_organisation(house: House) -> None:
    org, team, tag = str(house.org), str(house.team), "scenario=chat"
    whole = ({"scope_kind": "org", "scope_id": org}, {"scope_kind": "model", "scope_id": "tiny", "also": {"org": org}})
    parts = ({"scope_kind": "team", "scope_id": team}, {"scope_kind": "tag", "scope_id": tag, "also": {"org": org}})
    budget, limit = {"window": "month", "limit_amount": "1", "currency": "USD"}, {"kind": "requests", "limit": 1}
    async with house.client("admin") as operator, house.client("org admin") as client:
        for scope in whole:
            made = (await operator.put("/budgets", json=scope | budget)).json()
            limited = (await operator.put("/limits", json=scope | limit)).json()
            wallet = (await operator.post("/wallets", json=scope | {"currency": "USD"})).json()
            for method, path, body in (
                ("PUT", "/budgets", scope | budget | {"limit_amount": "1000000"}),
                ("DELETE", f"/budgets/{made['id']}", {}),
                ("PUT", "/limits", scope | limit | {"limit": 1000000}),
                ("DELETE", f"/limits/{limited['id']}", {}),
                ("POST", "/wallets", scope | {"currency": "USD"}),
                ("POST", f"/wallets/{wallet['id']}/top-up", {"amount": "1000000"}),
                ("POST", f"/wallets/{wallet['id']}/refund", {"amount": "1000000"}),
                ("POST", f"/wallets/{wallet['id']}/adjust", {"amount": "1000000", "note": "mine"}),
            ):
                answer = await client.request(method, path, json=body)
                assert answer.status_code == 403, (method, path, answer.text)
        assert len((await client.get("/budgets")).json()["data"]) == len(whole), "they are seen"
        for scope in parts:
            made = await client.put("/budgets", json=scope | budget)
            assert made.status_code == 200, made.text
            assert (await client.delete(f"/budgets/{made.json()['id']}")).status_code == 204
