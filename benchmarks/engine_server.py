"""A Farthing engine as a measured server: started as its own process, driven over HTTP."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

START_SECONDS = 180.0


@dataclass(frozen=True)
class Answer:
    """One streamed completion. Times in seconds from the moment the request was sent."""

    first: float
    last: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def engine(model: str, dtype: str) -> Iterator[tuple[str, float]]:
    """Run `python -m engine serve`; yields (base URL, seconds until it was ready)."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "engine", "serve", model, "--port", str(port), "--dtype", dtype]
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not _healthy(url):
                if child.poll() is not None or time.perf_counter() - began > START_SECONDS:
                    log.seek(0)
                    raise RuntimeError(f"the engine did not start:\n{log.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.05)
            yield url, time.perf_counter() - began
        finally:
            child.terminate()
            child.wait(30)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


async def complete(client: httpx.AsyncClient, model: str, prompt: list[int], tokens: int) -> Answer:
    """Stream one greedy completion of exactly `tokens` tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first = last = 0.0
    usage: dict[str, int] = {}
    cached = 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError((await reply.aread()).decode())
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter() - began
            frame = json.loads(line[6:])
            if frame["choices"]:
                first, last = first or now, now
            if frame.get("usage"):
                usage = frame["usage"]
                cached = frame["usage"]["prompt_tokens_details"]["cached_tokens"]
    if usage["completion_tokens"] != tokens:
        raise RuntimeError(f"asked for {tokens} tokens, got {usage['completion_tokens']}")
    return Answer(first, last, usage["prompt_tokens"], cached, tokens)


async def complete_all(url: str, model: str, prompts: list[list[int]], tokens: int) -> tuple[list[Answer], float]:
    """All prompts at once; returns the answers and the wall seconds from first send to last token."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        began = time.perf_counter()
        answers = await asyncio.gather(*(complete(client, model, prompt, tokens) for prompt in prompts))
        return list(answers), time.perf_counter() - began
