"""One model being served: its runner, its tokenizer, its scheduler, and the requests in progress."""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from engine.accounting import Clock, DeviceTime, Intervals
from engine.batch import BLOCK_TOKENS, FlatBatch, ModelConfig
from engine.block_manager import BlockManager
from engine.cost import measure
from engine.draw import draw, score_prompt
from engine.generation import Event, Generation
from engine.layout import Chunk
from engine.logits import TokenRules, needs_rules
from engine.logprobs import TokenScore
from engine.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence
from engine.tokenizer import Tokenizer

log = logging.getLogger("engine")

SCORED_ROWS = 64
"""Rows of a prompt to score in one forward."""


class Runner(Protocol):
    """What a model must offer; engine.runner.ModelRunner does."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def block_bytes(self) -> int: ...
    def allocate(self, num_blocks: int) -> None: ...
    def forward(self, batch: FlatBatch) -> Tensor: ...
    def hidden(self, batch: FlatBatch) -> Tensor: ...
    def choose(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor: ...
    @property
    def batch_invariant(self) -> bool: ...


class HostedModel:
    """Owned by the step loop after construction; the server only reads limits and counters."""

    def __init__(
        self,
        name: str,
        runner: Runner,
        tokenizer: Tokenizer,
        num_blocks: int,
        max_batch_tokens: int,
        tenant_floor: float = 0.0,
        sampling_peak: int = 0,
    ) -> None:
        self.name = name
        self.sampling_peak = sampling_peak
        """Most bytes that the logits and the sampling of a step take."""
        self.runner = runner
        self.tokenizer = tokenizer
        self.pool_tokens = num_blocks * BLOCK_TOKENS
        self.max_context = runner.config.max_context
        runner.allocate(num_blocks)
        self.cost = measure(runner, num_blocks, max_batch_tokens)
        self.blocks = BlockManager(num_blocks, tenant_floor=tenant_floor)
        self.scheduler = Scheduler(self.blocks, max_batch_tokens, self.max_context, self.cost.decode_weight)
        self.generations: dict[Sequence, Generation] = {}
        self.device = DeviceTime()
        self.token_intervals = Intervals()
        self.finished: Counter[str] = Counter()
        """Requests by finish reason."""
        self.tokens: Counter[str] = Counter()
        """Tokens of finished requests by class, named as in Account."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return min(self.max_context, self.pool_tokens)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def start(self, generation: Generation) -> None:
        self.generations[generation.sequence] = generation
        if needs_rules(generation.params):
            prompt = generation.sequence.tokens
            generation.rules = TokenRules(generation.params, prompt, self.tokenizer.eos_ids)
        self.scheduler.add(generation.sequence)

    def abort(self, generation: Generation) -> list[Event]:
        """End a generation now, in whatever state, and give its blocks back; nothing if it has ended already."""
        if generation.sequence not in self.generations:
            return []
        return [self._end(generation, "abort", generation.detokenizer.finish(cut=True))]

    def end_all(self, finish: FinishReason) -> list[Event]:
        """End whatever is in progress, for shutdown."""
        error = "The engine has failed and must be restarted." if finish == "error" else None
        return [self._end(generation, finish, "", error) for generation in list(self.generations.values())]

    def step(self, clock: Clock) -> list[Event]:
        """Compute one step and report what came of it. A step that fails ends the requests in it, not the engine."""
        chunks = self.scheduler.schedule(time.monotonic())
        try:
            drawn = [news for part in self._parts(chunks) for news in self._compute(part)]
            self.scheduler.commit(chunks)
            now = time.monotonic()
            for generation, _, _ in drawn:
                if (gap := generation.sequence.sampled(now)) is not None:
                    self.token_intervals.add(gap)
            pushed = [
                (generation, *generation.push(token, score, self.tokenizer.eos_ids))
                for generation, token, score in drawn
            ]
        except Exception as error:
            log.exception("A step of %s failed; its %d requests end with an error", self.name, len(chunks))
            self._close_step(chunks, clock)
            message = f"The model failed while computing this request: {type(error).__name__}."
            return [self._end(self.generations[chunk.sequence], "error", "", message) for chunk in chunks]
        self._close_step(chunks, clock)
        events = []
        for generation, text, finish in pushed:
            if finish is not None:
                events.append(self._end(generation, finish, text, generation.failure))
            elif generation.streaming and (text or generation.sequence.generated == 1):
                events.append(generation.event(text))
        return events + self._end_readers(chunks)

    def _parts(self, chunks: list[Chunk]) -> Iterator[list[Chunk]]:
        """The chunks as batches for one forward each: what is pooled, what is sampled, and prompts to score.

        A prompt's scores take logits of every row, so these go a few rows at a time: memory stays what the largest
        decode batch needs.
        """
        pooled: list[Chunk] = []
        plain: list[Chunk] = []
        scored: list[Chunk] = []
        for chunk in chunks:
            generation = self.generations[chunk.sequence]
            (pooled if generation.pooling else scored if generation.scores_prompt else plain).append(chunk)
        yield from (part for part in (pooled, plain) if part)
        for sequence, start, end in scored:
            for at in range(start, end, SCORED_ROWS):
                yield [Chunk(sequence, at, min(at + SCORED_ROWS, end))]

    def _compute(self, chunks: list[Chunk]) -> list[tuple[Generation, int, TokenScore | None]]:
        """Run one part; returns the tokens drawn."""
        batch = self.scheduler.batch(chunks)
        generations = [self.generations[chunk.sequence] for chunk in chunks]
        if generations[0].pooling:
            hidden = self.runner.hidden(batch)
            for generation, chunk, (first, end) in zip(generations, chunks, pairwise(batch.query_starts), strict=True):
                assert generation.pooling is not None
                generation.pooling.add(hidden[first:end], chunk.start)
            return []
        sampling = [g for g, chunk in zip(generations, chunks, strict=True) if chunk.samples and not g.only_reads]
        scoring = generations[0] if generations[0].scores_prompt else None
        if scoring is not None:
            _, start, end = chunks[0]
            first, last = max(start, len(scoring.prompt_scores)), min(end, scoring.sequence.prompt_len - 1)
            rows = [*range(first - start, last - start), *(() if not chunks[0].samples else (end - start - 1,))]
            logits = self.runner.forward(replace(batch, logits_rows=torch.tensor(rows, dtype=torch.int64)))
            score_prompt(logits[: last - first], scoring)
            scoring.sequence.reuse = not scoring.scores_prompt  # from now on a preempted one may come back by the cache
            logits = logits[last - first :]
        else:
            ends = zip(generations, chunks, batch.query_starts[1:], strict=True)
            rows = [end - 1 for generation, chunk, end in ends if chunk.samples and not generation.only_reads]
            logits = self.runner.forward(replace(batch, logits_rows=torch.tensor(rows, dtype=torch.int64)))
        drawn = draw(logits, sampling, self.runner.choose)
        return [(generation, token, score) for generation, (token, score) in zip(sampling, drawn, strict=True)]

    def _end_readers(self, chunks: list[Chunk]) -> list[Event]:
        """End what ends with its prompt."""
        read = [self.generations[chunk.sequence] for chunk in chunks if chunk.sequence in self.generations]
        done = [generation for generation in read if generation.only_reads and not generation.sequence.remaining]
        return [self._end(generation, "stop" if generation.pooling else "length", "") for generation in done]

    def _end(self, generation: Generation, finish: FinishReason, text: str, error: str | None = None) -> Event:
        sequence = generation.sequence
        now = time.monotonic()
        if finish == "abort":
            sequence.delivered = sequence.generated
        self.scheduler.remove(sequence, now)
        del self.generations[sequence]
        account = sequence.account(now)
        self.finished[finish] += 1
        # Choices share their prompt: it is counted with the first of them.
        names = ("output_text", "output_reasoning", "generated_tokens", "recomputed_tokens")
        for name in ("input_fresh", "input_cached", *names) if generation.is_first else names:
            self.tokens[name] += getattr(account, name)
        return generation.event("".join(generation.held_text) + text, finish, account, error)

    def _close_step(self, chunks: list[Chunk], clock: Clock) -> None:
        self.device.share(clock.busy_until(time.monotonic()), chunks, self.cost)
