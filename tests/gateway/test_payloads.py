"""Bodies are recorded where the key says so, never elsewhere, and never with a key in them."""

import asyncio
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select

import billing.payloads
from billing.payloads import Payload, Payloads
from billing.people import get_key, restrict_key
from billing.restrictions import Restrictions
from billing.tables import payload
from tests.gateway.running import Gateway
from tests.gateway.scripted import Scripted


async def record(gateway: Gateway, yes: bool = True) -> None:
    async with gateway.engine.begin() as conn:
        await restrict_key(conn, gateway.people.key, Restrictions(record_payloads=yes))
        assert (await get_key(conn, str(gateway.people.key))).record_payloads is yes
    await gateway.heard()


async def payloads(gateway: Gateway, count: int) -> list[Any]:
    """Once there are `count`; more is a failure."""
    async with asyncio.timeout(10):
        while True:
            async with gateway.engine.connect() as conn:
                found = list(await conn.execute(select(payload).order_by(payload.c.operation_id)))
            if len(found) >= count:
                assert len(found) == count
                return found
            await asyncio.sleep(0.05)


async def test_both_bodies_are_kept_streamed_or_not_and_only_where_asked(gateway: Gateway) -> None:
    await gateway.chat(messages=[{"role": "user", "content": "not kept"}])
    await record(gateway)
    key = gateway.people.secret
    whole = await gateway.chat(messages=[{"role": "user", "content": f"my key is {key}"}])
    stream = await gateway.chat(stream=True)
    refused = await gateway.send(b"no JSON")
    await record(gateway, yes=False)
    await gateway.chat()
    await gateway.rows(5)
    found = await payloads(gateway, 3)
    answers = [whole, stream, refused]
    assert [str(each.operation_id) for each in found] == [each.headers["x-farthing-trace-id"] for each in answers]
    assert [bytes(each.answer) for each in found] == [each.content for each in answers]
    assert [each.answer_bytes for each in found] == [len(each.content) for each in answers]
    assert b'"my key is ' + b"*" * len(key) + b'"' in bytes(found[0].request)
    assert found[2].request == b"no JSON"
    assert not any(key.encode() in bytes(each.request) + bytes(each.answer) for each in found)


async def test_long_bodies_are_cut_and_say_so(
    gateway: Gateway, upstream: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(billing.payloads, "BODY_BYTES", 50)
    await record(gateway)
    upstream.words = ["word "] * 40
    answer = await gateway.chat(stream=True)
    (one,) = await payloads(gateway, 1)
    assert bytes(one.answer) == answer.content[:50]
    assert one.answer_bytes == len(answer.content)
    assert one.request_bytes > len(one.request) == 50


async def test_what_waits_is_bounded_and_written_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(billing.payloads, "QUEUE_BYTES", 1000)
    monkeypatch.setattr(billing.payloads, "BATCH_BYTES", 250)
    queue = Payloads(gateway.engine)
    for n in range(12):
        queue.put(
            Payload(operation_id=UUID(int=n), request=b"x" * 60, request_bytes=60, answer=b"y" * 40, answer_bytes=40)
        )
    assert queue.dropped == 2
    await queue.drain()
    queue.put(Payload(operation_id=UUID(int=3), request=b"z", request_bytes=1, answer=b"", answer_bytes=0))
    await queue.drain()
    found = await payloads(gateway, 10)
    assert [each.operation_id for each in found] == [UUID(int=n) for n in range(10)]
    assert {bytes(each.request) for each in found} == {b"x" * 60}
