"""Every route says who may use it, and lets nobody else in."""

import itertools
import uuid
from pathlib import Path

import pytest
from litestar.routes import HTTPRoute
from sqlalchemy.ext.asyncio import create_async_engine

from billing import administrators
from billing.roles import RIGHTS, Right, Role, lower
from dashboards.web import COOKIE
from tests.gateway.administering import House, a_house

ROLES: dict[str, Role] = {
    "key": "owner",
    "owner": "owner",
    "admin": "admin",
    "org admin": "admin",
    "reader": "billing_reader",
    "org reader": "billing_reader",
    "member": "member",
}
ROUTES: dict[str, tuple[Right, bool]] = {
    # what it needs, and whether of all organisations
    "GET /me": ("own", False),
    "GET /orgs": ("read", False),
    "POST /orgs": ("manage", True),
    "GET /orgs/{org_id}": ("read", False),
    "PATCH /orgs/{org_id}": ("manage", False),
    "GET /teams": ("read", False),
    "POST /teams": ("manage", False),
    "GET /teams/{team_id}": ("read", False),
    "PATCH /teams/{team_id}": ("manage", False),
    "GET /users": ("read", False),
    "POST /users": ("manage", False),
    "GET /users/{user_id}": ("read", False),
    "PATCH /users/{user_id}": ("manage", False),
    "GET /keys": ("own", False),
    "POST /keys": ("manage", False),
    "GET /keys/{key_id}": ("own", False),
    "PATCH /keys/{key_id}": ("manage", False),
    "POST /keys/{key_id}/rotate": ("manage", False),
    "POST /keys/{key_id}/revoke": ("manage", False),
    "GET /budgets": ("read", False),
    "PUT /budgets": ("manage", False),
    "DELETE /budgets/{budget_id}": ("manage", False),
    "GET /limits": ("read", False),
    "PUT /limits": ("manage", False),
    "DELETE /limits/{limit_id}": ("manage", False),
    "GET /administrators": ("administer", False),
    "POST /administrators": ("administer", False),
    "GET /administrators/{administrator_id}": ("administer", False),
    "PATCH /administrators/{administrator_id}": ("administer", False),
    "POST /administrators/{administrator_id}/revoke": ("administer", False),
    "GET /tokens": ("administer", False),
    "POST /tokens": ("administer", False),
    "POST /tokens/{token_id}/revoke": ("administer", False),
    "GET /wallets": ("read", False),
    "POST /wallets": ("manage", False),
    "GET /wallets/{wallet_id}": ("read", False),
    "GET /wallets/{wallet_id}/entries": ("read", False),
    "POST /wallets/{wallet_id}/top-up": ("manage", False),
    "POST /wallets/{wallet_id}/refund": ("manage", False),
    "POST /wallets/{wallet_id}/adjust": ("manage", False),
    "POST /wallets/{wallet_id}/close": ("manage", False),
    "GET /prices": ("read", True),
    "POST /prices": ("manage", True),
    "POST /prices/preview": ("manage", True),
    "POST /prices/rerate": ("manage", True),
    "GET /usage": ("own", False),
    "GET /forecast": ("read", False),
    "GET /margins": ("read", True),
    "GET /operations/{operation_id}": ("read", False),
    "GET /exports/usage": ("read", False),
    "GET /exports/focus": ("read", False),
    "GET /invoices": ("read", False),
    "POST /invoices": ("manage", True),
    "GET /invoices/{invoice_id}": ("read", False),
    "GET /invoices/{invoice_id}/pdf": ("read", False),
    "GET /invoices/{invoice_id}/csv": ("read", False),
    "POST /invoices/{invoice_id}/void": ("manage", True),
    "GET /alerts": ("read", True),
    "GET /alerts/{alert_id}": ("read", True),
    "GET /alert-rules": ("read", True),
    "PUT /alert-rules": ("manage", True),
    "DELETE /alert-rules/{rule_id}": ("manage", True),
    "GET /alert-channels": ("read", True),
    "PUT /alert-channels/{name}": ("manage", True),
    "DELETE /alert-channels/{name}": ("manage", True),
    "POST /alert-channels/{name}/test": ("manage", True),
    "GET /alert-deliveries/{delivery_id}": ("read", True),
    "GET /silences": ("read", True),
    "POST /silences": ("manage", True),
    "DELETE /silences/{silence_id}": ("manage", True),
    "GET /audit": ("manage", True),
    "GET /leases": ("read", True),
    "POST /leases/free": ("manage", True),
    "POST /reconciliation": ("read", True),
}


@pytest.fixture
async def house(database_url: str, tmp_path: Path):
    engine = create_async_engine(database_url)
    yield await a_house(engine, database_url, tmp_path)
    await engine.dispose()


def declared(house: House) -> dict[str, tuple[Right, bool]]:
    found = {}
    for route in house.app.routes:
        assert isinstance(route, HTTPRoute)
        path = "/" + "/".join(
            f"{{{part.name}}}" if not isinstance(part, str) else part for part in route.path_components
        )
        for handler in route.route_handlers:
            for method in handler.http_methods:
                name = f"{method} {path}"
                if method != "OPTIONS" and not path.startswith("/openapi.json"):
                    found[name] = (handler.opt.get("right"), handler.opt.get("everywhere"))
    return found


async def test_every_route_declares_what_it_needs(house: House) -> None:
    assert declared(house) == ROUTES


async def test_each_role_is_let_in_where_it_may_and_nowhere_else(house: House) -> None:
    for who, (name, (right, everywhere)) in itertools.product(ROLES, ROUTES.items()):
        method, path = name.split(" ")
        for part in path.split("/"):
            if part.startswith("{"):
                path = path.replace(part, str(uuid.uuid4()))
        async with house.client(who) as client:
            answer = await client.request(method, path, json=None if method == "GET" else {})
        may = right in RIGHTS[ROLES[who]] and not (everywhere and who.startswith(("org", "member")))
        assert (answer.status_code != 403) == may, (name, answer.text)
        assert answer.status_code not in (401, 500), (name, answer.text)
        if not may:
            assert answer.json()["error"]["code"] == "forbidden"


async def test_nobody_gets_in_without_a_token(house: House) -> None:
    for who in (None, "wrong"):
        headers = {} if who is None else {"authorization": f"Bearer fat-{who}"}
        async with house.client(None, **headers) as client:
            for name in ("GET /orgs", "POST /orgs", "GET /me"):
                method, path = name.split(" ")
                answer = await client.request(method, path)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"


async def test_wrong_tokens_are_braked(house: House) -> None:
    async with house.client(None, authorization="Bearer fat-wrong") as client:
        codes = [(await client.get("/me")).status_code for _ in range(7)]
    assert codes == [401] * 5 + [429] * 2
    async with house.client("owner") as client:
        answer = await client.get("/me")
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) <= 60


async def test_an_administrator_of_one_organisation_sees_only_that(house: House) -> None:
    async with house.client("org admin") as client:
        assert [org["name"] for org in (await client.get("/orgs")).json()["data"]] == ["acme"]
        assert {key["org"] for key in (await client.get("/keys")).json()["data"]} == {"acme"}
        for path in (f"/orgs/{house.other_org}", f"/keys/{house.other_key}", f"/keys?org_id={house.other_org}"):
            assert (await client.get(path)).status_code == 404, path
        for body in ({"org_id": str(house.other_org), "name": "mine"},):
            assert (await client.post("/teams", json=body)).status_code == 404
            assert (await client.post("/keys", json=body)).status_code == 404
        assert (await client.post(f"/keys/{house.other_key}/revoke")).status_code == 404
        budget = {"scope_kind": "model", "scope_id": "tiny", "window": "month", "limit_amount": "1", "currency": "USD"}
        assert (await client.put("/budgets", json=budget)).status_code == 403
        other = budget | {"scope_kind": "key", "scope_id": str(house.other_key)}
        assert (await client.put("/budgets", json=other)).status_code == 404
        own = budget | {"scope_kind": "key", "scope_id": str(house.key)}
        assert (await client.put("/budgets", json=own)).status_code == 200
    async with house.client("owner") as client:
        made = (await client.put("/budgets", json=other)).json()
    async with house.client("org admin") as client:
        assert [each["scope_id"] for each in (await client.get("/budgets")).json()["data"]] == [str(house.key)]
        assert (await client.delete(f"/budgets/{made['id']}")).status_code == 404


async def test_a_member_sees_their_own_keys(house: House) -> None:
    async with house.client("owner") as client:
        body = {"org_id": str(house.org), "name": "other", "user_id": str(house.other_user)}
        other = (await client.post("/keys", json=body)).json()
    async with house.client("member") as client:
        assert [key["id"] for key in (await client.get("/keys")).json()["data"]] == [str(house.key)]
        assert (await client.get(f"/keys/{house.key}")).status_code == 200
        assert (await client.get(f"/keys/{other['id']}")).status_code == 404
        assert (await client.get(f"/keys?user_id={house.other_user}")).status_code == 404


async def test_a_token_may_less_than_its_owner_and_ends(house: House) -> None:
    async with house.engine.begin() as conn:
        weak = await administrators.create_token(conn, house.ids["owner"], "weak", role="billing_reader")
        with pytest.raises(ValueError, match="cannot have the role owner"):
            await administrators.create_token(conn, house.ids["reader"], "strong", role="owner")
    house.tokens["weak"] = weak.secret
    async with house.client("weak") as client:
        assert (await client.get("/me")).json()["role"] == "billing_reader"
        assert (await client.post("/orgs", json={"name": "x"})).status_code == 403
    async with house.client("owner") as client:
        assert (await client.post(f"/tokens/{weak.id}/revoke")).status_code == 200
    async with house.client("weak") as client:
        assert (await client.get("/me")).status_code == 401


async def test_a_revoked_administrator_is_out_at_once(house: House) -> None:
    cookie = {"cookie": f"{COOKIE}={house.sessions.issue(str(house.ids['admin']))}"}
    async with house.client("admin") as by_token, house.client(None) as by_cookie:
        assert (await by_token.get("/me")).status_code == 200
        assert (await by_cookie.get("/me", headers=cookie)).json()["role"] == "admin"
        async with house.client("key") as owner:
            assert (await owner.post(f"/administrators/{house.ids['admin']}/revoke")).status_code == 200
        assert (await by_token.get("/me")).status_code == 401
        assert (await by_cookie.get("/me", headers=cookie)).status_code == 401


async def test_a_changed_role_holds_at_once_for_tokens_made_before(house: House) -> None:
    async with house.client("key") as owner, house.client("owner") as other:
        changed = await owner.patch(f"/administrators/{house.ids['owner']}", json={"role": "billing_reader"})
        assert changed.json()["role"] == "billing_reader"
        assert (await other.get("/me")).json()["role"] == "billing_reader"
        refused = await owner.patch(f"/administrators/{house.ids['org admin']}", json={"role": "owner"})
        assert refused.status_code == 400


async def test_a_cookie_writes_from_our_own_pages_only(house: House) -> None:
    cookie = {"cookie": f"{COOKIE}={house.sessions.issue('admin-key')}"}
    async with house.client(None) as client:
        assert (await client.get("/orgs", headers=cookie)).status_code == 200
        for headers, status in (
            ({}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"sec-fetch-site": "same-site"}, 403),
            ({"origin": "http://evil.test"}, 403),
            ({"origin": "http://farthing.test", "sec-fetch-site": "cross-site"}, 403),
            ({"origin": "null"}, 403),
            ({"sec-fetch-site": "same-origin"}, 201),
            ({"origin": "http://farthing.test"}, 201),
        ):
            answer = await client.post("/orgs", json={"name": str(headers)}, headers=cookie | headers)
            assert answer.status_code == status, (headers, answer.text)


def test_the_lower_of_two_roles() -> None:
    assert lower("owner", "member") == lower("member", "owner") == "member"
    assert lower("admin", "billing_reader") == "billing_reader"
