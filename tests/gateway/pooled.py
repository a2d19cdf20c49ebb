"""A gateway in front of several scripted upstreams of one model, called `pair`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from tests.gateway.running import Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Script, Scripted, scripted_upstream

PRICE = {"input_fresh": "10", "input_cached": "1", "output_text": "20"}


@contextlib.asynccontextmanager
async def two_upstreams() -> AsyncIterator[tuple[Scripted, Scripted]]:
    async with scripted_upstream() as first, scripted_upstream() as second:
        yield first, second


@contextlib.asynccontextmanager
async def pooled(
    settings: dict[str, Any], *, a: dict[str, Any] | None = None, b: dict[str, Any] | None = None, **model: Any
) -> AsyncIterator[tuple[Gateway, Scripted, Scripted]]:
    """The gateway, with `pair` on upstreams `a` and `b` as given; nearly all goes to `a` first, where it can."""
    async with two_upstreams() as (first, second):
        for name, upstream, changes in (("a", first, a), ("b", second, b)):
            address = {"kind": "openai", "base_url": upstream.url, "connect_window_seconds": 1.0}
            settings["upstreams"][name] = address | (changes or {})
        preferring_a = [{"upstream": "a", "weight": 10**9}, {"upstream": "b"}]
        settings["models"]["pair"] = {"upstreams": preferring_a, "price": PRICE, "balance": "weighted"} | model
        async with running_gateway(settings) as gateway:
            yield gateway, first, second


def answering(status: int, headers: str = "", times: int = 10**9) -> Script:
    """An error, so many times; then an answer."""
    left = times

    async def script(request: Request, connection: Connection) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            await connection.json({"error": {"message": f"sorry, {status}"}}, status, headers)
        else:
            await said(connection)

    return script


async def until(condition: Callable[[], object]) -> None:
    """Return once `condition()` is true; fail after half a minute or more."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")


async def hanging(_: Request, connection: Connection) -> None:
    await connection.writer.wait_closed()


async def said(connection: Connection, text: str = "hello") -> None:
    """A whole answer with usage."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
    await connection.json({"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage})


def bodies(upstream: Scripted) -> list[dict[str, Any]]:
    return [msgspec.json.decode(request.raw) for request in upstream.chats]
