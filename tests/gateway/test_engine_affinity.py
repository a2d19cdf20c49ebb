"""Two engines of one model: a prompt goes where its blocks are, as the engines themselves say."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from gateway.upstreams import upstream
from gateway.upstreams.affinity import BlockFollower
from tests.engine.fake_model import fake_model
from tests.engine.serving import serving
from tests.gateway.pooled import PRICE, until
from tests.gateway.running import Gateway, running_gateway

LONG = "tell me about the harbour, the lighthouse and the sea " * 4


@dataclass
class Engines:
    urls: list[str]

    def cached(self, index: int) -> int:
        answer = httpx.get(f"{self.urls[index]}/v1/blocks", params={"model": "fake"}, trust_env=False)
        return len(answer.json()["added"])


@pytest.fixture
def engines() -> Iterator[Engines]:
    with _engine() as first, _engine() as second:
        yield Engines([first, second])


@contextmanager
def _engine() -> Iterator[str]:
    with serving(fake_model(num_blocks=64)) as url:
        yield url


@pytest.fixture
async def gateway(engines: Engines, settings: dict[str, Any]) -> AsyncIterator[Gateway]:
    for name, url in zip("ab", engines.urls, strict=True):
        settings["upstreams"][name] = {"kind": "engine", "base_url": f"{url}/v1", "connect_window_seconds": 2.0}
    settings["models"]["fake"] = {"upstreams": ["a", "b"], "price": PRICE}
    async with running_gateway(settings) as running:
        yield running


async def test_a_conversation_follows_its_blocks(
    engines: Engines, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "HASHES_SECONDS", 10.0)  # a busy machine may not tell within the product's patience
    followers: set[BlockFollower] = set()
    apply = BlockFollower.apply
    monkeypatch.setattr(BlockFollower, "apply", lambda self, changes: (followers.add(self), apply(self, changes)))
    messages = [{"role": "user", "content": LONG}]
    await _ask(gateway, messages)
    (home,) = {row["attempts"][0]["upstream"] for row in await gateway.rows(1)}
    index = "ab".index(home)
    await until(lambda: engines.cached(index) > 5)
    await until(lambda: any(len(follower.held) > 5 for follower in followers))
    for turn in range(5):
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"and {turn}"}]
        await _ask(gateway, messages)
    rows = await gateway.rows(6)
    assert [row["attempts"][0]["upstream"] for row in rows] == [home] * 6
    assert all(row["attempts"][0]["input_cached"] > 0 for row in rows[1:])


async def test_what_one_tenant_sent_says_nothing_of_another(engines: Engines) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        body = {"model": "fake", "messages": [{"role": "user", "content": LONG}], "block_hashes": True}
        one, two, same = [
            (await http.post(f"{url}/tokenize", json=body, headers={"x-farthing-tenant": tenant})).json()
            for url, tenant in ((engines.urls[0], "t1"), (engines.urls[0], "t2"), (engines.urls[1], "t1"))
        ]
    assert one["tokens"] == two["tokens"] and not set(one["block_hashes"]) & set(two["block_hashes"])
    assert one["block_hashes"] == same["block_hashes"] and len(one["block_hashes"]) == one["count"] // 16


async def _ask(gateway: Gateway, messages: list[dict[str, str]]) -> None:
    answer = await gateway.chat(model="fake", messages=messages, max_tokens=4)
    assert answer.status_code == 200, answer.text
