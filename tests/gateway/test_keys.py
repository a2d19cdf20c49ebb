"""Two gateways' keys on one real PostgreSQL: a change reaches both, wrong keys cost nobody, an outage is sat out."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from billing import people
from billing.notices import Notices
from billing.people import NewSecret, Principal
from billing.restrictions import Restrictions, networks
from gateway import key_cache
from gateway.auth import Keys
from gateway.database import connect, reachable
from gateway.errors import ApiError
from tests.gateway.wire import Wire

HOME = "127.0.0.1"


@dataclass
class Replica:
    """What a gateway process has of it, and how often it asked the database for keys."""

    keys: Keys
    notices: Notices
    queries: int = 0

    async def ask(self, secret: str, address: str = HOME) -> Principal:
        return await self.keys.authenticate({"authorization": f"Bearer {secret}"}, address)

    async def status(self, secret: str, address: str = HOME) -> int:
        try:
            await self.ask(secret, address)
        except ApiError as error:
            return error.status
        return 200

    def at_once(self, secret: str) -> Principal:
        """The answer without the event loop's help; fails where it would wait."""
        with pytest.raises(StopIteration) as done:
            self.keys.authenticate({"x-api-key": secret}, HOME).__await__().send(None)
        principal: Principal = done.value.value
        return principal


@contextlib.asynccontextmanager
async def replica(database_url: str, *, listening: bool = True) -> AsyncIterator[Replica]:
    engine = connect(database_url)
    notices = Notices(engine)
    running = Replica(Keys(engine, notices), notices)

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def count(_conn: object, _cursor: object, statement: str, *_: object) -> None:
        running.queries += "key_secret" in statement

    async def healthy() -> bool:
        return notices.healthy

    task = asyncio.create_task(notices.run()) if listening else None
    try:
        if task is not None:
            await seconds_until(healthy)
        yield running
    finally:
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await engine.dispose()


@dataclass
class Admin:
    engine: AsyncEngine
    org: UUID

    async def create(self, restrictions: Restrictions = people.UNRESTRICTED) -> NewSecret:
        async with self.engine.begin() as conn:
            return await people.create_key(conn, self.org, "k", restrictions=restrictions)

    async def change(self, work: Callable[[AsyncConnection], Awaitable[object]]) -> None:
        async with self.engine.begin() as conn:
            await work(conn)


@pytest.fixture
async def admin(database_url: str) -> AsyncIterator[Admin]:
    engine = create_async_engine(database_url)
    async with engine.begin() as conn:
        org = await people.create_org(conn, "Acme")
    yield Admin(engine, org)
    await engine.dispose()


async def seconds_until(condition: Callable[[], Awaitable[bool]], limit: float = 10.0) -> float:
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < limit, "it never came"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def test_a_revocation_reaches_every_replica_within_a_second(database_url: str, admin: Admin) -> None:
    key = await admin.create()
    async with replica(database_url) as one, replica(database_url) as two:
        for each in (one, two):
            assert (await each.ask(key.secret)).key_id == key.id
        asked = one.queries, two.queries
        began = time.monotonic()
        while time.monotonic() - began < 1.5:
            assert one.at_once(key.secret) == two.at_once(key.secret)
            await asyncio.sleep(0.01)
        assert (one.queries, two.queries) == asked == (1, 1), "a key that did not change is not asked for again"

        await admin.change(lambda conn: people.revoke_key(conn, key.id))

        async def refused() -> bool:
            return [await each.status(key.secret) for each in (one, two)] == [401, 401]

        assert await seconds_until(refused) < 1.0
        with pytest.raises(ApiError, match="has been revoked"):
            await one.ask(key.secret)


async def test_without_notices_a_revocation_takes_a_second_too(database_url: str, admin: Admin) -> None:
    keys, other = [await admin.create() for _ in range(3)], await admin.create()
    took: list[float] = []
    async with replica(database_url, listening=False) as deaf:
        while not took or (took[-1] >= 1.0 and len(took) < len(keys)):  # a busy machine may be late now and then
            key = keys[len(took)]
            assert await deaf.status(key.secret) == await deaf.status(other.secret) == 200
            await admin.change(partial(people.revoke_key, key_id=key.id))

            async def refused(secret: str = key.secret) -> bool:
                return await deaf.status(secret) == 401

            took.append(await seconds_until(refused))
        assert took[-1] < 1.0, took
        assert await deaf.status(other.secret) == 200


async def test_every_change_reaches_a_replica(database_url: str, admin: Admin) -> None:
    key = await admin.create()
    async with replica(database_url) as running:
        assert (await running.ask(key.secret)).models is None

        async def told(condition: Callable[[Principal], bool]) -> None:
            async def holds() -> bool:
                return condition(await running.ask(key.secret))

            assert await seconds_until(holds) < 1.0

        narrow = Restrictions(models=frozenset({"auto"}), tags={"scenario": "chat"}, networks=networks(["127.0.0.0/8"]))
        await admin.change(lambda conn: people.restrict_key(conn, key.id, narrow))
        await told(lambda principal: principal.models == {"auto"} and principal.tags == {"scenario": "chat"})
        assert await running.status(key.secret, "10.1.2.3") == 403
        soon = datetime.now(UTC) + timedelta(seconds=2.5)
        await admin.change(lambda conn: people.expire_key(conn, key.id, soon))
        await told(lambda principal: principal.expires_at == soon)

        async def expired() -> bool:
            return await running.status(key.secret) == 401

        await seconds_until(expired)
        assert datetime.now(UTC) - soon < timedelta(seconds=5), "no query is needed to know that time has passed"


async def test_after_a_rotation_both_secrets_work_until_the_old_one_ends(database_url: str, admin: Admin) -> None:
    old = await admin.create()
    async with replica(database_url) as running:
        assert await running.status(old.secret) == 200
        rotated: list[NewSecret | None] = []
        began = time.monotonic()

        async def rotate(conn: AsyncConnection) -> None:
            rotated.append(await people.rotate_key(conn, old.id, timedelta(seconds=2)))

        await admin.change(rotate)
        (new,) = rotated
        assert new is not None
        assert (await running.ask(old.secret)).key_id == (await running.ask(new.secret)).key_id == old.id

        async def replaced() -> bool:
            return await running.status(old.secret) == 401

        await seconds_until(replaced)
        assert 1.9 < time.monotonic() - began < 7
        with pytest.raises(ApiError, match="was replaced by a newer one and ended at"):
            await running.ask(old.secret)
        assert await running.status(new.secret) == 200


async def test_a_change_during_a_look_up_is_not_overlooked(
    database_url: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up read the key before it was revoked, and comes back after the notice of that."""
    key = await admin.create()
    read, go = asyncio.Event(), asyncio.Event()

    async def slow(conn: AsyncConnection, hashes: Sequence[bytes]) -> dict[bytes, Principal]:
        found = await people.find_keys(conn, hashes)
        read.set()
        await go.wait()
        return found

    monkeypatch.setattr(key_cache, "find_keys", slow)
    async with replica(database_url) as running:
        heard = asyncio.Event()
        running.notices.subscribe(people.KEYS_CHANNEL, lambda _: heard.set())
        asking = asyncio.create_task(running.status(key.secret))
        await read.wait()
        await admin.change(lambda conn: people.revoke_key(conn, key.id))
        await heard.wait()
        go.set()
        assert await asking == 401
        assert await running.status(key.secret) == 401


async def test_ten_thousand_wrong_keys_a_second(
    database_url: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_cache, "WRONG_ENTRIES", 2000)
    monkeypatch.setattr(key_cache, "reachable", lambda: reachable(60.0))  # a busy machine is not one without a database
    known, new = await admin.create(), await admin.create()
    async with replica(database_url) as running:
        assert await running.status(known.secret) == 200
        before = running.queries
        began = time.monotonic()
        wrong: list[asyncio.Task[int]] = []
        for part in range(10):
            wrong += [asyncio.create_task(running.status("fk-" + secrets.token_urlsafe(32))) for _ in range(1000)]
            for good, longest in ((known, 10.0), (new, 20.0)):  # one that is new here waits for a few batches, once
                asked = time.monotonic()
                assert await running.status(good.secret) == 200
                assert time.monotonic() - asked < longest
            await asyncio.sleep(max(0.0, began + (part + 1) * 0.1 - time.monotonic()))
        assert {await task for task in wrong} == {401}
        assert running.queries - before <= 50, "10,000 wrong keys are few queries"
        cache = running.keys._cache
        assert set(cache._known) == {people.key_hash(key.secret) for key in (known, new)}, "no good key is pushed out"
        assert len(cache._wrong) <= 2000 and not cache._waiting


async def test_a_wrong_key_that_comes_again_is_not_asked_for_again(database_url: str, admin: Admin) -> None:
    async with replica(database_url) as running:
        for _ in range(100):
            assert await running.status("fk-wrong") == 401
        assert running.queries == 1


@contextlib.asynccontextmanager
async def behind_a_wire(database_url: str, folder: Path) -> AsyncIterator[tuple[Replica, Wire]]:
    wire = Wire(str(folder), database_url)
    await wire.mend()
    async with replica(wire.url) as running:
        yield running, wire
    await wire.cut()


async def test_an_outage(database_url: str, admin: Admin, tmp_path: Path) -> None:
    """As if it were a minute: the database is away for longer than anything here is remembered or waited for."""
    known, revoked, new = await admin.create(), await admin.create(), await admin.create()
    async with behind_a_wire(database_url, tmp_path) as (running, wire):
        assert await running.status(known.secret) == await running.status(revoked.secret) == 200
        await wire.cut()
        began = time.monotonic()
        waits = []
        while time.monotonic() - began < 3.0:
            asked = time.monotonic()
            assert await running.status(known.secret) == await running.status(revoked.secret) == 200
            waits.append(time.monotonic() - asked)
            assert await running.status(new.secret) == await running.status("fk-wrong") == 503
            await asyncio.sleep(0.02)
        assert sorted(waits)[-3] < 0.5, "nobody waits for what is away; a busy machine may be late now and then"
        await admin.change(lambda conn: people.revoke_key(conn, revoked.id))
        assert await running.status(revoked.secret) == 200, "nobody here can know"
        await wire.mend()
        assert await running.status(known.secret) == 200
        assert await running.status(new.secret) == 200
        assert await running.status("fk-wrong") == 401

        async def refused() -> bool:
            return await running.status(revoked.secret) == 401

        assert await seconds_until(refused) < 1.0


async def test_a_database_that_hangs(database_url: str, admin: Admin, tmp_path: Path) -> None:
    known = await admin.create()
    async with behind_a_wire(database_url, tmp_path) as (running, wire):
        assert await running.status(known.secret) == 200
        wire.hold()
        began = time.monotonic()
        waits = []
        while time.monotonic() - began < 5.0:
            asked = time.monotonic()
            assert await running.status(known.secret) == 200
            waits.append(time.monotonic() - asked)
            await asyncio.sleep(0.01)
        assert sorted(waits)[-3] < key_cache.PATIENCE_SECONDS + 0.3, "a busy machine may be late now and then"
        assert sum(wait > 0.1 for wait in waits) < len(waits) / 10
        assert not running.notices.healthy
        assert await running.status("fk-wrong") == 503
        await wire.mend()

        async def back() -> bool:
            return running.notices.healthy and await running.status("fk-wrong") == 401

        await seconds_until(back)
