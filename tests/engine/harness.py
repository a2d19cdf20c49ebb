"""A step loop to submit requests to and collect their events from."""

import queue
import time

from engine.core import EngineCore
from engine.detokenizer import Detokenizer
from engine.generation import Event, Generation
from engine.hosted import HostedModel
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


def generation(
    model: HostedModel, prompt: str, count: int, *, streaming: bool = True, tenant: str = "", **params
) -> Generation:
    """A greedy request for exactly `count` tokens unless `params` say otherwise."""
    tokens = model.tokenizer.encode(prompt, add_special=True)
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
    sequence = Sequence("id", tenant.encode(), tokens, len(tokens), len(tokens) + count, time.monotonic())
    sequence.reuse = params.prompt_logprobs is None
    return Generation(sequence, params, Detokenizer(model.tokenizer, params.stop), streaming, params.seed or 0)


class Harness:
    """A running core whose events land in one queue."""

    def __init__(self, *models: HostedModel) -> None:
        self.models = models
        self.news: queue.Queue[list[Event]] = queue.Queue()
        self.core = EngineCore(models, self.news.put)

    def __enter__(self) -> "Harness":
        return self

    def __exit__(self, *exc: object) -> None:
        self.core.stop()
        for model in self.models:
            model.scheduler.check()
            assert not model.generations and model.blocks.held == 0

    def submit(self, model: HostedModel, prompt: str, count: int, **options) -> Generation:
        request = generation(model, prompt, count, **options)
        self.core.submit(model, request)
        return request

    def collect(self, *wanted: Generation) -> dict[Generation, list[Event]]:
        """All events up to the end of each wanted generation."""
        found: dict[Generation, list[Event]] = {request: [] for request in wanted}
        while not all(events and events[-1].finish for events in found.values()):
            for event in self.news.get(timeout=20):
                found.setdefault(event.generation, []).append(event)
        return found


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events)
