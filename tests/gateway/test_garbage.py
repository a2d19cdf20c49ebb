"""A request that is over is gone: its parts hold each other in no circle, which would stay until the collector comes.

The collector comes seldom (gateway/server.py), and what waits for it costs more than a tenth of a request's time.
"""

import gc
from collections.abc import Iterator

import pytest

from gateway.caller_request import CallerRequest
from gateway.exchange import Exchange
from gateway.operation import Operation
from gateway.upstreams.connection import HttpReply
from tests.gateway.running import Gateway

PARTS = (CallerRequest, Exchange, Operation, HttpReply)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_an_answered_request_waits_for_the_collector(
    gateway: Gateway, uncollected: None, stream: bool
) -> None:
    for _ in range(3):
        assert (await gateway.chat(stream=stream)).status_code == 200
    await gateway.rows(3)
    left = [type(found).__name__ for found in gc.get_objects() if type(found) in PARTS]
    assert len(left) <= len(PARTS), left  # those of the connection's last request
