"""The event loop's side of the engine: submits requests to the step loop and hands its news to whoever waits for it."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from engine.core import EngineCore
from engine.detokenizer import Detokenizer
from engine.errors import ApiError
from engine.hosted import Event, Generation, HostedModel
from engine.metrics import Latencies
from engine.sampling import SamplingParams
from engine.sequence import Sequence
from engine.tokenizer import SPACE, Tokenizer

Status = Literal["loading", "ok", "failed"]


@dataclass(slots=True, eq=False)
class Running:
    """A request the step loop knows of, until its last event has been seen."""

    id: str
    model: HostedModel
    generation: Generation
    news: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    async def batches(self) -> AsyncIterator[list[Event]]:
        """All events that have come, each time there are any; the very last one has `finish` set."""
        finished = False
        while not finished:
            batch = [await self.news.get()]
            while not self.news.empty():
                batch.append(self.news.get_nowait())
            yield batch
            finished = batch[-1].finish is not None


class Front:
    """Used on one event loop only, except `_deliver`. Serves nothing until `open` is called."""

    def __init__(self) -> None:
        self.core: EngineCore | None = None
        self.latencies = Latencies()
        self._running: dict[str, Running] = {}
        self._by_generation: dict[Generation, Running] = {}

    @property
    def status(self) -> Status:
        if self.core is None:
            return "loading"
        return "ok" if self.core.alive else "failed"

    def open(self, models: list[HostedModel]) -> None:
        """Start the step loop over loaded models."""
        for model in models:
            longest_token(model.tokenizer)  # kept; now, for it takes up to a second, which a request would wait for
        self.opened_at = int(time.time())
        self._loop = asyncio.get_running_loop()
        self.core = EngineCore(models, self._deliver)

    async def close(self) -> None:
        """Stop the step loop; requests still running end as aborted."""
        if self.core is not None:
            await asyncio.to_thread(self.core.stop)

    @property
    def models(self) -> dict[str, HostedModel]:
        """Models by name. Raises ApiError (503) unless the engine serves."""
        if self.core is None:
            raise ApiError(503, "The models are still loading: try again in a few seconds.", code="loading")
        if not self.core.alive:
            raise ApiError(503, "The engine has failed and must be restarted: see its log.", code="engine_failed")
        return self.core.models

    def model(self, name: str) -> HostedModel:
        """The model of that name; raises ApiError (404) when there is none."""
        model = self.models.get(name)
        if model is None:
            raise ApiError(
                404,
                f"There is no model {name!r} here: use one of {', '.join(self.models)}.",
                param="model",
                code="model_not_found",
            )
        return model

    def submit(
        self, id: str, tenant: str, model: HostedModel, prompt: list[int], params: SamplingParams, streaming: bool
    ) -> Running:
        """Start a request. An answer too long for the context or the pool is cut there and finishes with `length`.

        Raises ApiError when the prompt itself is too long, or the id is in use.
        """
        check_prompt(model, prompt)
        if id in self._running:
            raise ApiError(409, f"A request with the id {id!r} is already running.", code="duplicate_request_id")
        limit = model.max_model_len
        sequence = Sequence(
            id=id,
            salt=tenant.encode(),
            tokens=prompt,
            prompt_len=len(prompt),
            max_len=limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens),
            arrived=time.monotonic(),
        )
        seed = random.getrandbits(63) if params.seed is None else params.seed
        generation = Generation(sequence, params, Detokenizer(model.tokenizer, params.stop), streaming, seed)
        running = Running(id, model, generation)
        assert self.core is not None
        self.core.submit(model, generation)
        self._running[id] = self._by_generation[generation] = running
        return running

    def abort(self, running: Running) -> None:
        """End a request before the next step; harmless when it has ended."""
        if self.core is not None and running.id in self._running:
            self.core.abort(running.model, running.generation)

    def abort_all(self) -> None:
        for running in list(self._running.values()):
            self.abort(running)

    def find(self, id: str) -> Running | None:
        """The running request of that id, given as the caller's id or as the `id` of its reply."""
        return self._running.get(id) or self._running.get(id.removeprefix("chatcmpl-").removeprefix("cmpl-"))

    def _deliver(self, events: list[Event]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            running = self._by_generation[event.generation]
            if event.account is not None:
                del self._running[running.id], self._by_generation[event.generation]
                self.latencies.observe(running.model.name, event.account)
            running.news.put_nowait(event)


def check_prompt(model: HostedModel, prompt: list[int]) -> None:
    """Raise ApiError (400) for a prompt that this model can never answer."""
    if not prompt:
        raise ApiError(400, "The prompt is empty: give it at least one token.", param="prompt", code="empty_prompt")
    _check_length(model, len(prompt))
    vocabulary = model.runner.config.vocab_size
    if (highest := max(prompt)) >= vocabulary:
        raise ApiError(
            400,
            f"The prompt has the token id {highest}, but {model.name} knows only ids below {vocabulary}.",
            param="prompt",
            code="invalid_token_id",
        )


def check_text(model: HostedModel, text: str) -> None:
    """Raise ApiError (400) for a text too long for this model however it is cut into tokens, without cutting it.

    A tokenizer's normaliser may shorten text a little, by composing accents; the longest token is so far above the
    usual one that no text worth sending is near this bound.
    """
    size = len(text.replace(SPACE, " ").encode(errors="replace"))
    _check_length(model, -(-size // longest_token(model.tokenizer)), "at least ")


@lru_cache(maxsize=16)
def longest_token(tokenizer: Tokenizer) -> int:
    """Most bytes of text that one token can stand for; SPACE counts as the space that it spells."""
    names = (name.encode() for name in tokenizer.control_tokens)
    return max(len(spelt) for spelt in (*map(tokenizer.token_bytes, range(tokenizer.vocab_size)), *names))


def _check_length(model: HostedModel, count: int, bound: str = "") -> None:
    """Raise ApiError (400) when `count` tokens leave no room for an answer; `bound` goes before the number."""
    if count >= model.max_context:
        raise ApiError(
            400,
            f"The prompt has {bound}{count} tokens, but {model.name} has a context of {model.max_context} tokens for "
            "prompt and answer together: shorten the prompt.",
            code="context_length_exceeded",
        )
    if count >= model.pool_tokens:
        raise ApiError(
            400,
            f"The prompt has {bound}{count} tokens, but {model.name} has KV memory for {model.pool_tokens} tokens, "
            "prompt and answer together: shorten the prompt, or start the engine with more --kv-memory.",
            code="context_length_exceeded",
        )
