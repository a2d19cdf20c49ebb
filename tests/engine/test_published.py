"""What an engine tells of the blocks it holds: changes by number, all of them where too many were missed."""

import asyncio
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api_blocks import block_changes
from engine.block_manager import BlockManager, Space, token_bytes
from engine.front import Front
from engine.protocol import BlockChanges
from engine.published import LEAST_KEPT, Published, block_name
from tests.engine.fake_model import fake_model
from tests.engine.serving import complete, serving

PROMPT = "one two three four five six seven eight nine ten "


class Listener:
    """Knows what it was told."""

    def __init__(self) -> None:
        self.instance, self.sequence = "", 0
        self.held: set[str] = set()

    def hear(self, changes: BlockChanges) -> None:
        if changes.reset:
            self.held.clear()
        assert not set(changes.added) & set(changes.removed)
        self.held -= set(changes.removed)
        self.held |= set(changes.added)
        self.instance, self.sequence = changes.instance, changes.sequence


def held_by(manager: BlockManager) -> set[str]:
    return set(manager.changes_since("", 0).added)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans()), max_size=40))
@settings(max_examples=60, deadline=None)
def test_who_listens_now_and_then_knows_what_is_held(steps: list[tuple[int, int, bool]]) -> None:
    manager, listener = BlockManager(8), Listener()
    for prompt, count, listens in steps:
        tokens = [prompt] * (16 * count)
        hashes: list[bytes] = []
        manager.extend_hashes(hashes, Space(b""), tokens, count)
        known = manager.match(hashes, Space(b""), tokens)
        manager.acquire(known)
        fresh = manager.allocate(count - len(known), b"")
        assert fresh is not None
        blocks = known + fresh
        for i in range(len(known), count):
            content = token_bytes(tokens[16 * i : 16 * i + 16])
            registered = manager.register(blocks[i], blocks[i - 1] if i else -1, hashes[i], Space(b""), content)
            assert registered == blocks[i]
        manager.release(blocks)
        if listens:
            listener.hear(manager.changes_since(listener.instance, listener.sequence))
            assert listener.held == held_by(manager)
    listener.hear(manager.changes_since(listener.instance, listener.sequence))
    assert listener.held == held_by(manager)


def test_who_missed_too_much_is_told_all() -> None:
    published = Published(kept=0)
    for number in range(LEAST_KEPT + 5):
        published.added(number.to_bytes(8, "big"))
    held = [b"12345678"]
    assert published.since(published.instance, 4, held).reset
    changes = published.since(published.instance, 5, held)
    assert not changes.reset and len(changes.added) == LEAST_KEPT
    assert published.since(published.instance, LEAST_KEPT + 6, held).reset, "a number from the future"
    other = published.since("another instance", LEAST_KEPT, held)
    assert other.reset and other.added == [block_name(held[0])]


def test_a_block_that_came_and_went_is_told_as_gone() -> None:
    published = Published(kept=10)
    published.added(b"aaaaaaaa")
    published.removed(b"aaaaaaaa")
    published.removed(b"bbbbbbbb")
    published.added(b"bbbbbbbb")
    changes = published.since(published.instance, 0, [])
    assert (changes.added, changes.removed) == ([block_name(b"bbbbbbbb")], [block_name(b"aaaaaaaa")])


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving(fake_model(num_blocks=16)) as url, httpx.Client(base_url=url, timeout=10, trust_env=False) as client:
        yield client


def changes(http: httpx.Client, **query: object) -> dict[str, object]:
    answer = http.get("/v1/blocks", params={"model": "fake", **query})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_blocks_are_named_as_tokenize_names_them(http: httpx.Client) -> None:
    tenant = {"x-farthing-tenant": "acme"}
    before = changes(http)
    assert complete(http, PROMPT, 4, headers=tenant).status_code == 200
    since = {"instance": before["instance"], "since": before["sequence"]}
    after = changes(http, **since, wait=2)
    body = {"model": "fake", "prompt": PROMPT, "block_hashes": True}
    named = http.post("/tokenize", json=body, headers=tenant).json()["block_hashes"]
    assert len(named) == len(PROMPT) // 16 == 3
    assert not after["reset"] and set(named) <= set(after["added"])
    assert set(named).isdisjoint(http.post("/tokenize", json=body).json()["block_hashes"])
    assert "block_hashes" not in http.post("/tokenize", json=body | {"block_hashes": False}).json()


def test_news_are_waited_for(http: httpx.Client) -> None:
    now = changes(http)
    since = {"instance": now["instance"], "since": now["sequence"]}
    started = time.monotonic()
    assert changes(http, **since, wait=0.3) == {**now, "reset": False, "added": [], "removed": []}
    assert time.monotonic() - started >= 0.3
    asking = threading.Timer(0.2, complete, (http, "another " + PROMPT))
    asking.start()
    started = time.monotonic()
    assert changes(http, **since, wait=8)["added"]
    assert time.monotonic() - started < 7
    asking.join()


@pytest.mark.parametrize(("query", "status"), [({"model": "none"}, 404), ({"since": "x"}, 400), ({"wait": "x"}, 400)])
def test_bad_questions_are_refused(http: httpx.Client, query: dict[str, str], status: int) -> None:
    assert http.get("/v1/blocks", params={"model": "fake", **query}).status_code == status


def test_a_negative_number_is_told_all(http: httpx.Client) -> None:
    now = changes(http)
    assert changes(http, instance=now["instance"], since=-5)["reset"]


def test_a_loading_engine_says_so() -> None:
    with serving() as url:
        assert httpx.get(f"{url}/v1/blocks", params={"model": "fake"}, trust_env=False).status_code == 503


def test_waiting_ends_when_the_engine_stops() -> None:
    asyncio.run(_stops_quickly())


async def _stops_quickly() -> None:
    front, model = Front(), fake_model(num_blocks=16)
    front.open([model])
    now = await block_changes(front, model, "", 0, 0.0)
    waiting = asyncio.create_task(block_changes(front, model, now.instance, now.sequence, 30.0))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    front.is_stopping = True
    await asyncio.wait_for(waiting, 10)
    await front.close()
