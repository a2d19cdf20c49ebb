"""Changing the configuration of a running gateway: the new one once it is right, the old one until then."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from structlog.testing import capture_logs

from billing.notices import Notices
from gateway.live import Live
from gateway.prices import Prices
from gateway.reload import Reload
from gateway.settings_file import load
from tests.gateway.pooled import until
from tests.gateway.running import ADMIN_KEY_HASH
from tests.gateway.samples import chat_call

TOML = """
[roles]
small = "one"
large = "one"
[router]
threshold = {threshold}
[upstreams.a]
kind = "openai"
base_url = "http://127.0.0.1:1/v1"
{key}
[upstreams.b]
kind = "openai"
base_url = "http://127.0.0.1:{port}/v1"
[models.one]
upstreams = ["a", "b"]
price = {{ input_fresh = "{price}", input_cached = "1", output_text = "2" }}
"""


class Running:
    def __init__(self, path: Path, live: Live, prices: Prices, reload: Reload) -> None:
        self.path = path
        self.live = live
        self.prices = prices
        self.reload = reload

    def write(self, price: str = "1", port: int = 2, key: str = "", threshold: str = "0.5", more: str = "") -> None:
        self.path.write_text(TOML.format(price=price, port=port, key=key, threshold=threshold) + more)


@pytest.fixture
async def running(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setenv("FARTHING_DATABASE_URL", database_url)
    monkeypatch.setenv("FARTHING_ADMIN_KEY_HASH", ADMIN_KEY_HASH)
    monkeypatch.setenv("FARTHING_DATA_DIR", str(tmp_path))
    path = tmp_path / "farthing.toml"
    path.write_text(TOML.format(price="1", port=2, key="", threshold="0.5"))
    settings = load(path)
    engine = create_async_engine(database_url)
    live, prices = Live(settings), Prices(engine, settings, Notices(engine))
    await prices.apply(settings)
    yield Running(path, live, prices, Reload(path, live, prices))
    await live.close()
    await engine.dispose()


async def test_what_has_not_changed_keeps_its_connections_and_what_is_known_of_it(running: Running) -> None:
    before_a, before_b = running.live.upstreams["a"], running.live.upstreams["b"]
    first, second = running.live.pools["one"].targets
    running.write(price="5", port=3)
    assert await running.reload.reload()
    assert running.live.upstreams["a"] is before_a and running.live.upstreams["b"] is not before_b
    now_first, now_second = running.live.pools["one"].targets
    assert now_first is first and now_second is not second
    assert running.live.settings.upstreams["b"].base_url.endswith(":3/v1")


async def test_prices_are_in_force_before_the_models_are(running: Running) -> None:
    running.write(price="5", more='[models.two]\nupstreams = ["a"]\nprice = { input_fresh = "7", output_text = "7" }\n')
    assert await running.reload.reload()
    one, two = running.prices.book().sale("one"), running.prices.book().sale("two")
    assert one is not None and two is not None and (one.input_fresh, two.input_fresh) == (5, 7)
    assert "two" in running.live.pools


async def test_a_router_takes_its_new_threshold(running: Running) -> None:
    call = chat_call("Why is the sky blue?")
    assert running.live.router.route(call).role == "small"
    running.write(threshold="0.1")
    assert await running.reload.reload()
    assert running.live.router.route(call).role == "large"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"price": "-1"}, "price.input_fresh"),
        ({"threshold": "= 2"}, "not valid TOML"),
        ({"key": 'api_key_env = "NO_SUCH_KEY"'}, "NO_SUCH_KEY"),
        ({"more": "[models.two]\nupstreams = ['c']\n"}, "'c' is not among [upstreams]"),
        ({"more": "[limits]\ngrace_seconds = 7\n"}, "limits.grace_seconds cannot change in a running gateway"),
    ],
)
async def test_a_wrong_one_changes_nothing_and_is_explained(
    running: Running, change: dict[str, str], said: str
) -> None:
    before = (running.live.settings, running.live.pools, running.prices.book().sale("one"))
    running.write(**change)
    with capture_logs() as logs:
        assert not await running.reload.reload()
    assert (running.live.settings, running.live.pools, running.prices.book().sale("one")) == before
    (entry,) = (entry for entry in logs if entry["log_level"] == "error")
    assert any(said in reason for reason in entry["reasons"])


async def test_a_key_is_read_again_from_its_file(running: Running, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first")
    running.write(key=f'api_key_file = "{key}"')
    assert await running.reload.reload()
    with_first = running.live.upstreams["a"]
    assert await running.reload.reload()
    assert running.live.upstreams["a"] is with_first
    key.write_text("second")
    assert await running.reload.reload()
    changed = running.live.upstreams["a"]
    assert changed is not with_first and changed.key is not None and changed.key.get_secret_value() == "second"


async def test_an_upstream_that_goes_is_closed_when_its_last_request_ends(running: Running) -> None:
    closed = asyncio.Event()
    target = running.live.pools["one"].targets[1]

    async def close() -> None:
        closed.set()

    target.upstream.close = close  # type: ignore[method-assign]
    target.enter()
    running.write(port=3)
    assert await running.reload.reload()
    await asyncio.sleep(0.05)
    assert not closed.is_set()
    target.leave()
    await asyncio.wait_for(closed.wait(), 10)


async def test_a_changed_file_and_a_signal_are_noticed(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.reload.LOOK_SECONDS", 0.05)
    watching = asyncio.create_task(running.reload.run())
    try:
        await asyncio.sleep(0.1)
        running.write(price="3")
        await until(lambda: _price(running) == 3)
        monkeypatch.setattr("gateway.reload.LOOK_SECONDS", 60.0)
        await asyncio.sleep(0.1)
        running.write(price="4")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: _price(running) == 4)
    finally:
        watching.cancel()


def _price(running: Running) -> Any:
    price = running.prices.book().sale("one")
    return price and price.input_fresh
