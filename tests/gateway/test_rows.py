"""Rows that are lost after their caller has left."""

import asyncio
from typing import Any

import pytest

from billing.records import OperationRecord
from billing.spool import Done, Spool, SpoolFullError
from tests.gateway.running import Gateway
from tests.gateway.scripted import Scripted
from tests.gateway.test_budgets import limit
from tests.gateway.test_disk_full import ONE_CALL


@pytest.mark.parametrize("stream", [False, True])
async def test_a_row_that_is_lost_after_its_caller_has_left_holds_nothing(
    gateway: Gateway, upstream: Scripted, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    await limit(gateway, ONE_CALL)
    writing: list[Done] = []

    def slow(_: Spool, record: OperationRecord, done: Done, slot: Any = None) -> None:
        writing.append(done)

    async with asyncio.timeout(20):
        with monkeypatch.context() as patch:
            patch.setattr(Spool, "write", slow)
            async with gateway.raw_chat(max_tokens=5, stream=stream):
                while not writing:  # noqa: ASYNC110 - what is waited for happens elsewhere
                    await asyncio.sleep(0.01)
            while "farthing_requests_in_flight 0.0" not in (await gateway.http.get("/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            writing[0](SpoolFullError("the disk is full"))
            await asyncio.sleep(0.1)
    assert (await gateway.chat(max_tokens=5)).status_code == 200, "nothing is held for the call without a row"
