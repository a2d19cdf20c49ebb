"""One model being served: its runner, its tokenizer, its scheduler, and the requests in progress."""

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.accounting import Clock, CostModel, DeviceTime
from engine.batch import BLOCK_TOKENS, FlatBatch, ModelConfig
from engine.block_manager import BlockManager
from engine.detokenizer import Detokenizer
from engine.protocol import Account
from engine.sampling import SamplingParams, sample
from engine.scheduler import Chunk, Scheduler
from engine.sequence import FinishReason, Sequence
from engine.tokenizer import Tokenizer

log = logging.getLogger("engine")


class Runner(Protocol):
    """What a model must offer; engine.runner.ModelRunner does."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def block_bytes(self) -> int: ...
    def allocate(self, num_blocks: int) -> None: ...
    def forward(self, batch: FlatBatch) -> Tensor: ...


class Event(NamedTuple):
    """News of one generation, made by the step loop."""

    generation: "Generation"
    text: str
    delivered: int
    """Output tokens whose text has been handed over, this event included."""
    finish: FinishReason | None = None
    account: Account | None = None
    """Set when `finish` is."""
    error: str | None = None


@dataclass(slots=True, eq=False)
class Generation:
    """A request in progress: its sequence, and how its tokens become text."""

    sequence: Sequence
    params: SamplingParams
    detokenizer: Detokenizer
    streaming: bool
    """Whether text is reported as it comes, or only with the last event."""
    seed: int
    held_text: list[str] = field(default_factory=list)


class HostedModel:
    """Owned by the step loop after construction; the server only reads limits and counters."""

    def __init__(self, name: str, runner: Runner, tokenizer: Tokenizer, num_blocks: int, max_batch_tokens: int) -> None:
        self.name = name
        self.runner = runner
        self.tokenizer = tokenizer
        self.pool_tokens = num_blocks * BLOCK_TOKENS
        self.max_context = runner.config.max_context
        runner.allocate(num_blocks)
        self.blocks = BlockManager(num_blocks)
        self.scheduler = Scheduler(self.blocks, max_batch_tokens, self.max_context)
        self.cost = CostModel.of(runner.config)
        self.generations: dict[Sequence, Generation] = {}
        self.device = DeviceTime()
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
        sampling = [self.generations[chunk.sequence] for chunk in chunks if chunk.samples]
        try:
            logits = self.runner.forward(self.scheduler.batch(chunks))
            tokens = self._sample(logits, sampling)
            self.scheduler.commit(chunks)
            now = time.monotonic()
            pushed = [self._push(generation, token, now) for generation, token in zip(sampling, tokens, strict=True)]
        except Exception as error:
            log.exception("A step of %s failed; its %d requests end with an error", self.name, len(chunks))
            self._share_time(chunks, clock)
            message = f"The model failed while computing this request: {type(error).__name__}."
            return [self._end(self.generations[chunk.sequence], "error", "", message) for chunk in chunks]
        self._share_time(chunks, clock)
        events = []
        for generation, (text, finish) in zip(sampling, pushed, strict=True):
            if finish is not None:
                events.append(self._end(generation, finish, text))
            elif generation.streaming and (text or generation.sequence.generated == 1):
                events.append(Event(generation, text, generation.sequence.delivered))
        return events

    def _sample(self, logits: Tensor, sampling: list[Generation]) -> list[int]:
        if not sampling:
            return []
        return sample(
            logits, [g.params for g in sampling], [g.seed for g in sampling], [len(g.sequence.tokens) for g in sampling]
        )

    def _push(self, generation: Generation, token: int, now: float) -> tuple[str, FinishReason | None]:
        """Append a sampled token; returns the text that may be shown now, and why it was the last one, if it was."""
        sequence, detokenizer = generation.sequence, generation.detokenizer
        sequence.tokens.append(token)
        if sequence.first_token is None:
            sequence.first_token = now
        if token in self.tokenizer.eos_ids and not generation.params.ignore_eos:
            sequence.delivered = sequence.generated - 1
            return detokenizer.finish(), "stop"
        text = detokenizer.push(token)
        if text:
            sequence.delivered = sequence.generated
        if detokenizer.stopped:
            return text, "stop"
        if len(sequence.tokens) >= sequence.max_len:
            sequence.delivered = sequence.generated
            return text + detokenizer.finish(cut=True), "length"
        if not generation.streaming:
            generation.held_text.append(text)
        return text, None

    def _end(self, generation: Generation, finish: FinishReason, text: str, error: str | None = None) -> Event:
        sequence = generation.sequence
        now = time.monotonic()
        if finish == "abort":
            sequence.delivered = sequence.generated
        self.scheduler.remove(sequence, now)
        del self.generations[sequence]
        account = sequence.account(now)
        self.finished[finish] += 1
        for name in ("input_fresh", "input_cached", "output_text", "generated_tokens", "recomputed_tokens"):
            self.tokens[name] += getattr(account, name)
        return Event(generation, "".join(generation.held_text) + text, sequence.delivered, finish, account, error)

    def _share_time(self, chunks: list[Chunk], clock: Clock) -> None:
        """Close the step's time and charge it to the chunks by weight; positions past the prompt are decode."""
        weights = []
        for sequence, start, end in chunks:
            prompt = sequence.prompt_len
            weights.append(
                (self.cost.weight(start, min(end, prompt)), self.cost.weight(max(start, prompt), end))
            )  # a chunk crosses the border only when it recomputes after a preemption
            self.device.prefill_tokens += max(0, min(end, prompt) - start)
            self.device.decode_tokens += max(0, end - max(start, prompt))
        rate = clock.busy_until(time.monotonic()) / sum(prefill + decode for prefill, decode in weights)
        for chunk, (prefill, decode) in zip(chunks, weights, strict=True):
            chunk.sequence.prefill_seconds += prefill * rate
            chunk.sequence.decode_seconds += decode * rate
            self.device.prefill_seconds += prefill * rate
            self.device.decode_seconds += decode * rate
        self.device.steps += 1
