"""The admin API as a part of the gateway, on its socket: one session with the dashboard, no secret left behind."""

import hashlib
from typing import Any

import httpx
import pytest

from billing.roles import Caller
from gateway.admin import orgs
from tests.gateway.administering import ADMIN_KEY
from tests.gateway.running import Gateway, running_gateway
from tests.gateway.test_secrets import dump, logs


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"admin_key_hash": hashlib.sha256(ADMIN_KEY.encode()).hexdigest()}


def operator(gateway: Gateway, token: str = ADMIN_KEY) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {token}"}
    return httpx.AsyncClient(base_url=f"{gateway.url}/admin/v1", headers=headers, trust_env=False)


async def test_a_key_made_through_the_api_works_until_it_is_revoked(gateway: Gateway) -> None:
    async with operator(gateway) as admin:
        made = (await admin.post("/keys", json={"org_id": str(gateway.people.org), "name": "made"})).json()
        headers = {"authorization": f"Bearer {made['key']}"}
        assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 200
        assert (await admin.post(f"/keys/{made['id']}/revoke")).status_code == 200
        for _ in range(100):
            if (await gateway.http.get("/v1/models", headers=headers)).status_code == 401:
                break
        else:
            raise AssertionError("a revoked key still works")


async def test_other_paths_are_answered_in_the_same_shape(gateway: Gateway) -> None:
    async with operator(gateway) as admin:
        for path in ("/", "/nothing", "/orgs/1/2/3", "/orgs/"):
            answer = await admin.get(path)
            assert answer.status_code in (200, 404), path
            if answer.status_code == 404:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        described = await admin.get("/openapi.json")
        assert described.status_code == 200 and "cdn" not in described.text
    assert (await gateway.http.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
    with_users_key = operator(gateway, gateway.people.secret)
    async with with_users_key as user:
        refused = await user.get("/orgs")
        assert refused.status_code == 401 and "fk-" in refused.json()["error"]["message"]


async def test_the_dashboard_s_session_is_one_for_the_api_too(gateway: Gateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as browser:
        assert (await browser.post("/dashboard/sign-in", data={"key": ADMIN_KEY})).status_code == 303
        assert (await browser.get("/admin/v1/me")).json()["actor"] == "admin-key"
        forged = await browser.post("/admin/v1/orgs", json={"name": "x"}, headers={"origin": "https://evil.test"})
        assert forged.status_code == 403
        own = await browser.post("/admin/v1/orgs", json={"name": "x"}, headers={"origin": gateway.url})
        assert own.status_code == 201
        await browser.post("/dashboard/sign-out")
        assert (await browser.get("/admin/v1/me")).status_code == 401


@pytest.mark.parametrize(("proxies", "others_status"), [(["127.0.0.1"], 303), ([], 429)])
async def test_who_guesses_keys_behind_a_proxy_of_ours_slows_down_nobody_else(
    settings: dict[str, Any], proxies: list[str], others_status: int
) -> None:
    """Where the proxy is none of ours, its word for who is behind it does not count, and all of them are one."""
    async with (
        running_gateway(settings | {"trusted_proxies": proxies}) as gateway,
        httpx.AsyncClient(base_url=f"{gateway.url}/dashboard", trust_env=False) as browser,
    ):

        async def sign_in(address: str, key: str) -> int:
            forwarded = {"x-forwarded-for": f"192.0.2.250, {address}"}
            return (await browser.post("/sign-in", data={"key": key}, headers=forwarded)).status_code

        assert [await sign_in("203.0.113.9", "wrong") for _ in range(9)] == [401] * 8 + [429]
        assert await sign_in("203.0.113.9", ADMIN_KEY) == 429
        assert await sign_in("203.0.113.10", ADMIN_KEY) == others_status


async def test_no_token_is_in_logs_or_database(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(caller: Caller, org_id: object) -> None:
        raise RuntimeError("this went wrong")

    with logs():
        async with running_gateway(settings) as gateway:
            async with operator(gateway) as admin:
                who = (await admin.post("/administrators", json={"name": "Eve", "role": "owner"})).json()
                made = await admin.post(
                    "/tokens",
                    json={"administrator_id": who["id"], "name": "t"},
                    headers={"idempotency-key": "idempotency-91ba"},
                )
                token = made.json()["token"]
            async with operator(gateway, token) as eve, operator(gateway, "fat-wrong-77c1") as wrong:
                monkeypatch.setattr(orgs, "refuse_other_org", fail)
                assert (await eve.get(f"/orgs/{gateway.people.org}")).status_code == 500
                assert (await wrong.get("/me")).status_code == 401
            database = await dump(gateway.engine)
    logged = "".join(capfd.readouterr())
    assert "this went wrong" in logged and who["id"] in database
    for secret in (token, ADMIN_KEY, "fat-wrong-77c1"):
        assert secret not in logged and secret not in database
    assert "idempotency-91ba" not in database
