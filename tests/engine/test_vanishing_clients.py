"""A thousand clients that go away in mid-stream: over real sockets, nothing of them stays."""

import asyncio
import json
import time

import httpx

from engine.core import EngineCore
from engine.hosted import HostedModel
from tests.engine.fake_model import expected_text, fake_model
from tests.engine.serving import GREEDY, complete, serving

CLIENTS = 1000
AT_ONCE = 200


async def vanish(port: int, i: int) -> None:
    """Ask for a stream, read until there is text, and go: by turns with a reset, and with a close after a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({**GREEDY, "prompt": f"client {i}", "max_tokens": 400, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    await asyncio.wait_for(reader.readuntil(b'"text":"'), 60)
    if i % 2:
        await asyncio.sleep(0.001 * (i % 50))
        writer.close()
    else:
        writer.transport.abort()


async def vanish_all(port: int) -> None:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(i: int) -> None:
        async with places:
            await vanish(port, i)

    await asyncio.gather(*(one(i) for i in range(CLIENTS)))


def test_a_thousand_clients_vanish_and_generation_stops_within_a_step(monkeypatch) -> None:
    model = fake_model(num_blocks=4000, budget=512, max_context=512)
    asked: dict[object, int] = {}
    late: list[int] = []
    abort, end = EngineCore.abort, HostedModel.abort

    def noted_abort(core: EngineCore, model: HostedModel, generation) -> None:
        asked.setdefault(generation, model.device.steps)
        abort(core, model, generation)

    def noted_end(model: HostedModel, generation):
        if generation.sequence in model.generations:
            late.append(model.device.steps - asked[generation])
        return end(model, generation)

    monkeypatch.setattr(EngineCore, "abort", noted_abort)
    monkeypatch.setattr(HostedModel, "abort", noted_end)
    with serving(model) as url:
        asyncio.run(vanish_all(int(url.rsplit(":", 1)[1])))
        deadline = time.monotonic() + 60
        while model.finished.total() < CLIENTS and time.monotonic() < deadline:
            time.sleep(0.01)
        assert model.finished == {"abort": CLIENTS}
        assert len(late) == CLIENTS and max(late) <= 1  # the step in progress when the abort was asked for
        assert model.blocks.held == model.scheduler.reserved == len(model.scheduler.waiting) == 0
        assert model.blocks.free + model.blocks.cached == 4000
        steps = model.device.steps
        time.sleep(0.1)
        assert model.device.steps == steps, "it still generates"
        assert model.tokens["output_text"] < CLIENTS * 400 / 2
        with httpx.Client(base_url=url) as http:
            assert complete(http, "after all that").json()["choices"][0]["text"] == expected_text("after all that", 8)
