"""Keys: wrong, revoked and expired ones, in OpenAI's shape, and how fast a revocation works."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

import pytest
from openai import AuthenticationError

from billing.people import create_key, revoke_key
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


async def test_a_revoked_key_stops_within_about_a_second(gateway: Gateway) -> None:
    assert (await gateway.chat()).status_code == 200
    async with gateway.engine.begin() as connection:
        assert await revoke_key(connection, gateway.people.key)
    revoked = time.monotonic()
    while (answer := await gateway.chat()).status_code == 200:
        assert time.monotonic() - revoked < 1.5
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


async def test_keys_and_prompts_reach_no_log(
    gateway: Gateway, upstream: Scripted, capfd: pytest.CaptureFixture[str]
) -> None:
    await gateway.chat(messages=[{"role": "user", "content": "the-secret-prompt"}])
    await upstream.stop()
    await gateway.chat(messages=[{"role": "user", "content": "the-secret-prompt"}])
    out = "".join(capfd.readouterr())
    assert gateway.people.secret not in out
    assert "the-secret-prompt" not in out
