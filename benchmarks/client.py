"""Asks any server that speaks OpenAI's /v1/completions, with prompts of token ids and answers of a fixed length."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx


@dataclass(frozen=True)
class Answer:
    """One greedy completion. Times are in seconds from the moment the request was sent."""

    first: float
    """When the first token came; of an answer that was not streamed, when it was whole."""
    last: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    text: str


class Client:
    """One server and the model asked for. Use as `async with`."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=1800, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def complete(self, prompt: list[int], tokens: int) -> Answer:
        """Exactly `tokens` tokens, in one piece."""
        began = time.perf_counter()
        reply = await self._http.post("/v1/completions", json=self._body(prompt, tokens))
        seconds = time.perf_counter() - began
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.text}")
        body = reply.json()
        return _answer(seconds, seconds, body["usage"], body["choices"][0]["text"], tokens)

    async def stream(self, prompt: list[int], tokens: int) -> Answer:
        """Exactly `tokens` tokens, as they come."""
        body = self._body(prompt, tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        times: list[float] = []
        frames: list[str] = []
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError(f"{reply.status_code}: {(await reply.aread()).decode()}")
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):  # decoded afterwards: the cores are the server's while it works
                    times.append(time.perf_counter() - began)
                    frames.append(line[6:])
        decoded = [json.loads(frame) for frame in frames]
        usage = next(frame["usage"] for frame in reversed(decoded) if frame.get("usage"))
        spoken = [
            (when, choices[0])
            for when, frame in zip(times, decoded, strict=True)
            if (choices := frame["choices"]) and (choices[0]["text"] or not choices[0].get("finish_reason"))
        ]
        text = "".join(choice["text"] for _, choice in spoken)
        return _answer(spoken[0][0], spoken[-1][0], usage, text, tokens)

    async def write(self, prompt: str, tokens: int, stop: Sequence[str]) -> tuple[str, int]:
        """A greedy answer up to `stop`, the end of text or `tokens` tokens, and how many tokens it took."""
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        reply = await self._http.post("/v1/completions", json=body | {"stop": list(stop)})
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {reply.text}")
        answer = reply.json()
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    async def together(self, prompts: Sequence[list[int]], tokens: int) -> tuple[list[Answer], float]:
        """All prompts at once; the answers and the wall seconds until the last was whole."""
        began = time.perf_counter()
        answers = await asyncio.gather(*(self.complete(prompt, tokens) for prompt in prompts))
        return list(answers), time.perf_counter() - began

    def _body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }


def _answer(first: float, last: float, usage: dict[str, Any], text: str, tokens: int) -> Answer:
    if usage["completion_tokens"] != tokens:
        raise RuntimeError(f"asked for {tokens} tokens, got {usage['completion_tokens']}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(first, last, usage["prompt_tokens"], cached, tokens, text)
