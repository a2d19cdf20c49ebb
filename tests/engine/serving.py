"""Runs an engine server on a free port, in this process, and asks it for completions."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn

from engine.front import Front
from engine.hosted import HostedModel
from engine.serve import bind
from engine.server import create_app

GREEDY = {"model": "fake", "temperature": 0, "ignore_eos": True}


def complete(http: httpx.Client, prompt: object, count: int = 8, headers: dict[str, str] | None = None, **body):
    body = {**GREEDY, "prompt": prompt, "max_tokens": count, **body}
    return http.post("/v1/completions", json=body, headers=headers)


@contextmanager
def serving(*models: HostedModel) -> Iterator[str]:
    """Base URL of a server over `models`; none at all leaves it loading. Checks at the end that no block is held."""
    front = Front()
    server = uvicorn.Server(uvicorn.Config(create_app(front), log_level="warning", timeout_graceful_shutdown=5))
    listener = bind("127.0.0.1", 0)

    async def run() -> None:
        if models:
            front.open(list(models))
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
    for model in models:
        model.scheduler.check()
        assert not model.generations and model.blocks.held == 0
