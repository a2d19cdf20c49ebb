"""The event loop's side of the engine: submits requests to the step loop and hands its news to whoever waits for it."""

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Literal

from engine import guided
from engine.answer_form import AnswerForm
from engine.combined import combine
from engine.core import EngineCore
from engine.detokenizer import Detokenizer
from engine.errors import ApiError
from engine.generation import Event, Generation
from engine.hosted import HostedModel
from engine.limits import check_answer, check_prompt, longest_token
from engine.logprobs import TokenScore
from engine.metrics import Latencies
from engine.pooling import Pooling, PoolingKind
from engine.protocol import Account
from engine.sampling import choice_seed
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

Status = Literal["loading", "ok", "failed"]

_PREFIX = re.compile("^(chatcmpl|cmpl|embd)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a caller wants of one model."""

    id: str
    tenant: str
    prompts: list[list[int]]
    params: SamplingParams
    streaming: bool = False
    choices: int = 1
    """Answers to give to each prompt."""
    drafts: int = 1
    """Answers to write to it, of which the `choices` most likely ones are given."""
    priority: int = 0
    form: AnswerForm = field(default_factory=AnswerForm)


@dataclass(slots=True, eq=False)
class Running:
    """A request the step loop knows of, until its last event has been seen."""

    id: str
    model: HostedModel
    generations: list[Generation]
    """All of the first prompt, then all of the next."""
    per_prompt: int = 1
    news: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    accounts: dict[Generation, Account] = field(default_factory=dict)
    """Of the generations that have ended."""

    @property
    def account(self) -> Account:
        """The whole request's, once all its generations have ended."""
        accounts = [self.accounts[generation] for generation in self.generations]
        size = self.per_prompt
        groups = [accounts[at : at + size] for at in range(0, len(accounts), size)]
        return combine([combine(group, one_prompt=True) for group in groups], one_prompt=False)

    @property
    def firsts(self) -> list[Generation]:
        """The first generation of each prompt, which has the prompt's scores."""
        return self.generations[:: self.per_prompt]

    @property
    def prompt_scores(self) -> list[list[TokenScore]]:
        """Of each prompt."""
        return [generation.prompt_scores for generation in self.firsts]

    @property
    def prompt_tokens(self) -> int:
        return sum(generation.sequence.prompt_len for generation in self.firsts)

    @property
    def cached_tokens(self) -> int:
        return sum(generation.sequence.cached_tokens or 0 for generation in self.firsts)

    async def batches(self) -> AsyncIterator[list[Event]]:
        """All events that have come, each time there are any, until every generation has had its last one."""
        left = len(self.generations)
        while left:
            batch = [await self.news.get()]
            while not self.news.empty():
                batch.append(self.news.get_nowait())
            left -= sum(event.finish is not None for event in batch)
            yield batch


class Front:
    """Used on one event loop only, except `_deliver`. Serves nothing until `open` is called."""

    def __init__(self) -> None:
        self.core: EngineCore | None = None
        self.latencies = Latencies()
        self._running: dict[str, Running] = {}
        self._by_generation: dict[Generation, Running] = {}
        self.is_stopping = False
        """Nobody should wait for news any more."""

    @property
    def status(self) -> Status:
        if self.core is None:
            return "loading"
        return "ok" if self.core.alive else "failed"

    def open(self, models: list[HostedModel]) -> None:
        """Start the step loop over loaded models."""
        for model in models:
            longest_token(model.tokenizer)  # both are kept; now, for they take seconds, which a request would wait for
            guided.warm_up(model.tokenizer)
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
        return self.working_core.models

    @property
    def working_core(self) -> EngineCore:
        """Raises ApiError (503) unless the engine serves."""
        if self.core is None:
            raise ApiError(503, "The models are still loading: try again in a few seconds.", code="loading")
        if not self.core.alive:
            raise ApiError(503, "The engine has failed and must be restarted: see its log.", code="engine_failed")
        return self.core

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

    def submit(self, model: HostedModel, order: Order) -> Running:
        """Start a request. An answer too long for the context or the pool is cut there and finishes with `length`.

        Raises ApiError when the prompt itself is too long, or the id is in use.
        """
        for prompt in order.prompts:
            check_prompt(model, prompt)
            check_answer(model, len(prompt), order.params.max_tokens)
        seed = random.getrandbits(63) if order.params.seed is None else order.params.seed
        per_prompt = max(order.drafts, order.choices)
        generations = [
            _generation(model, order, prompt, choice, choice_seed(seed, choice), at * per_prompt + choice)
            for at, prompt in enumerate(order.prompts)
            for choice in range(per_prompt)
        ]
        return self._start(order.id, model, generations, per_prompt)

    def submit_texts(
        self, model: HostedModel, id: str, tenant: str, texts: list[list[int]], kind: PoolingKind, priority: int
    ) -> Running:
        """Start computing one vector for each text; raises ApiError as `submit` does."""
        generations = []
        for index, tokens in enumerate(texts):
            check_prompt(model, tokens, "input")
            sequence = _sequence(id, tenant, tokens, len(tokens), priority)
            sequence.reserves_all, sequence.reuse = True, False
            detokenizer = Detokenizer(model.tokenizer)
            generations.append(
                Generation(sequence, SamplingParams(), detokenizer, False, 0, index, pooling=Pooling(kind))
            )
        return self._start(id, model, generations)

    def _start(self, id: str, model: HostedModel, generations: list[Generation], per_prompt: int = 1) -> Running:
        if id in self._running:
            raise ApiError(409, f"A request with the id {id!r} is already running.", code="duplicate_request_id")
        running = Running(id, model, generations, per_prompt)
        assert self.core is not None
        for generation in generations:
            self.core.submit(model, generation)
        self._running[id] = running
        for generation in generations:
            self._by_generation[generation] = running
        return running

    def abort(self, running: Running) -> None:
        """End a request before the next step; harmless when it has ended."""
        if self.core is not None and running.id in self._running:
            for generation in running.generations:
                self.core.abort(running.model, generation)

    def abort_all(self) -> None:
        for running in list(self._running.values()):
            self.abort(running)

    def find(self, id: str) -> Running | None:
        """The running request of that id, given as the caller's id or as the `id` of its reply."""
        return self._running.get(id) or self._running.get(_PREFIX.sub("", id))

    def _deliver(self, events: list[Event]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            running = self._by_generation[event.generation]
            if event.account is not None:
                del self._by_generation[event.generation]
                running.accounts[event.generation] = event.account
                if event.finish == "error":
                    self.abort(running)
                if len(running.accounts) == len(running.generations):
                    del self._running[running.id]
                    self.latencies.observe(running.model.name, running.account)
            running.news.put_nowait(event)


def _generation(model: HostedModel, order: Order, prompt: list[int], choice: int, seed: int, index: int) -> Generation:
    """Of one choice; the prompt's first one scores the prompt, where that is wanted."""
    limit, params, form = model.max_model_len, order.params, order.form
    own = params if choice == 0 else replace(params, prompt_logprobs=None)
    length = limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens)
    sequence = _sequence(order.id, order.tenant, prompt, length, order.priority)
    sequence.reserves_all = params.max_tokens is not None
    sequence.reuse = own.prompt_logprobs is None
    detokenizer = Detokenizer(model.tokenizer, params.stop, include_stop=params.include_stop, shown=form.shown)
    grammar = form.constraint() if form.constraint is not None else None
    meter = form.meter() if form.meter is not None else None
    return Generation(sequence, own, detokenizer, order.streaming, seed, index, grammar, meter, is_first=choice == 0)


def _sequence(id: str, tenant: str, prompt: list[int], max_len: int, priority: int) -> Sequence:
    return Sequence(
        id=id,
        salt=tenant.encode(),
        tokens=list(prompt),
        prompt_len=len(prompt),
        max_len=max_len,
        arrived=time.monotonic(),
        priority=priority,
    )
