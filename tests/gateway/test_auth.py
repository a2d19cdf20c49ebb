"""Keys over HTTP: wrong, revoked, expired and restricted ones, in OpenAI's shape, and how fast a revocation works."""

import asyncio
import secrets
import time
from datetime import UTC, datetime, timedelta

import pytest
from openai import AuthenticationError

from billing.people import create_key, restrict_key, revoke_key
from billing.restrictions import Restrictions, networks
from gateway import key_cache
from gateway.database import reachable
from tests.gateway.running import CHAT, Gateway
from tests.gateway.scripted import Scripted


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (None, "did not provide an API key"),
        ("", "did not provide an API key"),
        ("Basic abc", "must read `Bearer fk-…`"),
        ("Bearer", "must read `Bearer fk-…`"),
        ("Bearer sk-abc", "keys start with `fk-`"),
        ("Bearer fk-" + "x" * 5000, "Incorrect API key"),
        ("Bearer fk-wrong", "Incorrect API key"),
        ("Bearer fk-\u00e9\u00ff", "Incorrect API key"),
    ],
)
async def test_no_key_and_wrong_keys(gateway: Gateway, upstream: Scripted, header: str | None, said: str) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1", "replace")}
    del gateway.http.headers["authorization"]
    for path, method in (("/v1/chat/completions", "POST"), ("/v1/models", "GET")):
        answer = await gateway.http.request(method, path, headers=headers, content=b"not even json")
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert said in error["message"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "wrong" not in error["message"] and "sk-abc" not in error["message"]
    assert not upstream.chats
    await gateway.rows(0)


async def test_the_sdk_knows_it_as_an_authentication_error(gateway: Gateway) -> None:
    client = gateway.sdk.with_options(api_key="fk-wrong")
    with pytest.raises(AuthenticationError, match="Incorrect API key"):
        await client.chat.completions.create(**CHAT)


async def test_anthropics_header_is_as_good(gateway: Gateway) -> None:
    bearer = gateway.http.headers.pop("authorization")
    secret = gateway.people.secret
    assert (await gateway.http.get("/v1/models", headers={"x-api-key": secret})).status_code == 200
    both = {"x-api-key": secret, "authorization": bearer}
    assert (await gateway.http.get("/v1/models", headers=both)).status_code == 200
    assert (await gateway.http.get("/v1/models", headers={"authorization": f"bearer  {secret}"})).status_code == 200
    for other in ({"x-api-key": "fk-other", "authorization": bearer}, both | {"authorization": "Bearer fk-other"}):
        answer = await gateway.http.get("/v1/models", headers=other)
        assert answer.status_code == 401
        assert "carry different API keys" in answer.json()["error"]["message"]
    wrong = await gateway.http.get("/v1/models", headers={"x-api-key": "sk-ant-1"})
    assert wrong.status_code == 401 and "keys start with `fk-`" in wrong.json()["error"]["message"]


async def test_a_revoked_key_stops_within_a_second(gateway: Gateway) -> None:
    assert (await gateway.chat()).status_code == 200
    async with gateway.engine.begin() as connection:
        assert await revoke_key(connection, gateway.people.key)
    revoked = time.monotonic()
    while (answer := await gateway.chat()).status_code == 200:
        assert time.monotonic() - revoked < 1.0
        await asyncio.sleep(0.05)
    assert answer.status_code == 401
    assert "has been revoked" in answer.json()["error"]["message"]


async def test_an_expired_key_is_named_as_such(gateway: Gateway) -> None:
    async with gateway.engine.begin() as connection:
        past = datetime.now(UTC) - timedelta(hours=1)
        key = await create_key(connection, gateway.people.org, "old", expires_at=past)
    headers = {"authorization": f"Bearer {key.secret}"}
    answer = await gateway.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert answer.status_code == 401
    assert "expired at" in answer.json()["error"]["message"]


async def restricted(gateway: Gateway, restrictions: Restrictions) -> None:
    async with gateway.engine.begin() as connection:
        await restrict_key(connection, gateway.people.key, restrictions)
    await gateway.heard()


async def test_a_key_for_some_models(gateway: Gateway, upstream: Scripted) -> None:
    await restricted(gateway, Restrictions(models=frozenset({"small", "hosted"})))
    assert (await gateway.chat(model="small")).status_code == 200
    for model in ("tiny", "auto", "big", "none"):  # small is tiny, but it is the name that counts
        answer = await gateway.chat(model=model)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")
        assert f"may not use the model '{model}', only hosted, small." in answer.json()["error"]["message"]
    assert len(upstream.chats) == 1
    listed = (await gateway.http.get("/v1/models")).json()["data"]
    assert {model["id"] for model in listed} == {"small", "hosted"}
    rows = await gateway.rows(5)
    assert [(row["status"], row["http_status"]) for row in rows] == [("ok", 200)] + [("invalid", 403)] * 4


async def test_a_key_for_some_routes(gateway: Gateway, upstream: Scripted) -> None:
    await restricted(gateway, Restrictions(routes=frozenset({"models", "messages"})))
    assert (await gateway.http.get("/v1/models")).status_code == 200
    answer = await gateway.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "route_not_allowed")
    assert "may not use chat.completions, only messages, models." in answer.json()["error"]["message"]
    await restricted(gateway, Restrictions(routes=frozenset({"chat.completions"})))
    assert (await gateway.http.get("/v1/models")).status_code == 403
    assert (await gateway.chat()).status_code == 200
    assert len(upstream.chats) == 1


async def test_a_key_for_some_addresses(gateway: Gateway, upstream: Scripted) -> None:
    await restricted(gateway, Restrictions(networks=networks(["10.0.0.0/8", "2001:db8::/32"])))
    for header in ({}, {"x-forwarded-for": "10.0.0.1"}, {"forwarded": "for=10.0.0.1"}):
        answer = await gateway.http.get("/v1/models", headers=header)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "address_not_allowed")
        assert "may not be used from 127.0.0.1" in answer.json()["error"]["message"]
    await restricted(gateway, Restrictions(networks=networks(["127.0.0.1"])))
    assert (await gateway.http.get("/v1/models")).status_code == 200


async def test_ten_thousand_wrong_keys_while_good_requests_go_on(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_cache, "reachable", lambda: reachable(60.0))  # a busy machine is not one without a database
    port = int(gateway.url.rpartition(":")[2])
    ask = "GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer fk-{}\r\n\r\n"

    async def storm(keys: int) -> int:
        """One connection, request after request; how many were answered 401."""
        refused = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(keys):
            writer.write(ask.format(secrets.token_urlsafe(32)).encode())
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            refused += head.startswith(b"HTTP/1.1 401 ")
        writer.close()
        return refused

    storms = asyncio.gather(*(storm(100) for _ in range(100)))
    served = 0
    while not storms.done():
        began = time.monotonic()
        assert (await gateway.chat()).status_code == 200
        assert time.monotonic() - began < 10
        served += 1
    assert sum(await storms) == 10_000
    assert served > 3
