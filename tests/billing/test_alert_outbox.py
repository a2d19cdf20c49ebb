"""The outbox: nothing is lost, little comes twice, what is refused too often is kept with the reason."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from aiohttp import web
from sqlalchemy import func, insert, update
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts import outbox
from billing.alerts.channels import set_channel
from billing.alerts.message import Message
from billing.alerts.outbox import Delivery, deliver, deliver_one, enqueue, find_delivery, send_test
from billing.ids import new_id
from billing.tables import alert, alert_delivery
from tests.billing.receivers import Receiver, http_receiver

NOW = datetime.now(UTC)


@pytest.fixture
async def receiver(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    """The address of the channel `ops`."""
    async with http_receiver() as running, engine.begin() as conn:
        monkeypatch.setenv("ALERT_URL", running.url)
        await set_channel(conn, "ops", "webhook", "env:ALERT_URL")
        await conn.commit()
        yield running


def a_message(event: Any = "opened", alert_id: UUID | None = None) -> Message:
    return Message(
        event=event, alert_id=alert_id, rule="spike", scope_kind="all", scope_id="", scope="everything",
        summary="Much was spent.", opened_at=NOW, at=NOW,
    )  # fmt: skip


async def put(engine: AsyncEngine, *messages: Message) -> list[UUID]:
    async with engine.begin() as conn:
        return [identifier for message in messages for identifier in await enqueue(conn, ["ops"], message)]


async def found(engine: AsyncEngine, delivery_id: UUID) -> Delivery:
    async with engine.begin() as conn:
        delivery = await find_delivery(conn, delivery_id)
    assert delivery is not None
    return delivery


async def make_due(engine: AsyncEngine) -> None:
    async with engine.begin() as conn:
        await conn.execute(update(alert_delivery).values(due_at=func.now()))


async def test_a_message_is_sent_once_by_many_senders(engine: AsyncEngine, receiver: Receiver) -> None:
    async def slowly(_: web.Request) -> web.Response:
        await asyncio.sleep(0.02)
        return web.Response()

    receiver.answer = slowly
    identifiers = await put(engine, *(a_message() for _ in range(20)))
    await asyncio.gather(*(deliver(engine) for _ in range(3)))
    assert Counter(got.headers["webhook-id"] for got in receiver.got) == dict.fromkeys(map(str, identifiers), 1)
    assert {(await found(engine, each)).status for each in identifiers} == {"sent"}


async def test_a_failure_is_tried_again_later_each_time(engine: AsyncEngine, receiver: Receiver) -> None:
    receiver.answer = lambda _: web.Response(status=503, text="not now")
    [identifier] = await put(engine, a_message())
    pauses = []
    for attempt in range(1, 4):
        await make_due(engine)
        await deliver(engine)
        delivery = await found(engine, identifier)
        assert (delivery.status, delivery.attempts, delivery.error) == ("waiting", attempt, "HTTP 503: not now")
        pauses.append((delivery.due_at - datetime.now(UTC)).total_seconds())
        await deliver(engine)  # not due: nothing happens
        assert len(receiver.got) == attempt
    assert 7 <= pauses[0] <= 12.6 and 14 <= pauses[1] <= 25.1 and 29 <= pauses[2] <= 50.1
    receiver.answer = lambda _: web.Response()
    await make_due(engine)
    await deliver(engine)
    delivery = await found(engine, identifier)
    assert (delivery.status, delivery.attempts, delivery.error) == ("sent", 4, None)
    assert {got.headers["webhook-id"] for got in receiver.got} == {str(identifier)}


async def test_after_the_last_attempt_it_is_dead_and_says_why(engine: AsyncEngine, receiver: Receiver) -> None:
    receiver.answer = lambda _: web.Response(status=410, text="gone")
    [identifier] = await put(engine, a_message())
    async with engine.begin() as conn:
        await conn.execute(update(alert_delivery).values(attempts=outbox.ATTEMPTS - 1))
    await deliver(engine)
    delivery = await found(engine, identifier)
    assert (delivery.status, delivery.error) == ("dead", "HTTP 410: gone") and delivery.ended_at is not None
    await make_due(engine)
    assert not await deliver_one(engine) and len(receiver.got) == 1


async def test_a_receiver_may_ask_for_time(engine: AsyncEngine, receiver: Receiver) -> None:
    receiver.answer = lambda _: web.Response(status=429, headers={"retry-after": "600"})
    [identifier] = await put(engine, a_message())
    await deliver(engine)
    assert (await found(engine, identifier)).due_at > datetime.now(UTC) + timedelta(seconds=590)


async def test_who_dies_between_sending_and_marking_has_it_sent_again(engine: AsyncEngine, receiver: Receiver) -> None:
    """The message is out, the mark is not: as after a kill -9, its transaction is rolled back."""
    arrived = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        arrived.set()
        await asyncio.sleep(30)
        return web.Response()

    receiver.answer = hang
    [identifier] = await put(engine, a_message())
    sender = asyncio.create_task(deliver_one(engine))
    await arrived.wait()
    assert not await deliver_one(engine), "another replica leaves it alone while the first one has it"
    sender.cancel()
    await asyncio.gather(sender, return_exceptions=True)
    receiver.answer = lambda _: web.Response()
    assert await deliver_one(engine)
    assert [got.headers["webhook-id"] for got in receiver.got] == [str(identifier)] * 2
    assert (await found(engine, identifier)).status == "sent"


async def test_the_end_of_an_alert_is_not_told_before_its_beginning(engine: AsyncEngine, receiver: Receiver) -> None:
    row = {
        "id": new_id(), "rule_id": new_id(), "kind": "spike", "scope_kind": "all", "scope_id": "", "subject": "",
        "level": 0, "summary": "s", "details": {}, "opened_at": NOW, "updated_at": NOW,
    }  # fmt: skip
    async with engine.begin() as conn:
        await conn.execute(insert(alert).values(row))
    receiver.answer = lambda _: web.Response(status=500)
    first, _ = await put(engine, a_message("opened", row["id"]), a_message("resolved", row["id"]))
    await deliver(engine)
    assert [got.headers["webhook-id"] for got in receiver.got] == [str(first)]
    receiver.answer = lambda _: web.Response()
    await make_due(engine)
    await deliver(engine)
    assert [json.loads(got.body)["type"] for got in receiver.got[1:]] == ["alert.opened", "alert.resolved"]


async def test_a_message_is_only_sent_when_its_transaction_commits(engine: AsyncEngine, receiver: Receiver) -> None:
    async with engine.connect() as conn:
        await enqueue(conn, ["ops"], a_message())
        await deliver(engine)
        await conn.rollback()
    await deliver(engine)
    assert receiver.got == []


async def test_a_test_message_goes_the_way_of_all(engine: AsyncEngine, receiver: Receiver) -> None:
    async with engine.begin() as conn:
        identifier = await send_test(conn, "ops")
        with pytest.raises(ValueError, match="there is no channel 'nowhere'"):
            await send_test(conn, "nowhere")
    await deliver(engine)
    assert json.loads(receiver.got[0].body)["type"] == "alert.test"
    assert (await found(engine, identifier)).status == "sent"
