"""A flood and a quiet tenant on the real small model: measured, on whatever machine this is."""

import queue
import random
import threading
import time
from pathlib import Path

import pytest

from engine.core import EngineCore
from engine.detokenizer import Detokenizer
from engine.generation import Event, Generation
from engine.hosted import HostedModel
from engine.runner import default_dtype, load
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

ROUNDS = 8
FLOOD = 24
ATTEMPTS = 3
"""Others use this machine too: one of them must do."""


class Clients:
    """Ask a core for answers to random prompts, and hear when each ends."""

    def __init__(self, model: HostedModel) -> None:
        self.model = model
        self.core = EngineCore([model], self._hear)
        self.ended: dict[Generation, queue.Queue[Event]] = {}
        self.texts = random.Random(3)

    def _hear(self, events: list[Event]) -> None:
        for event in events:
            if event.finish is not None:
                self.ended[event.generation].put(event)

    def ask(self, tenant: bytes, prompt: int, output: int) -> Event:
        """One request from start to end."""
        tokens = self.texts.choices(range(1000, 20_000), k=prompt)
        sequence = Sequence("", tenant, tokens, prompt, prompt + output, time.monotonic(), reserves_all=True)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        generation = Generation(sequence, params, Detokenizer(self.model.tokenizer), False, 0)
        self.ended[generation] = queue.Queue()
        self.core.submit(self.model, generation)
        return self.ended[generation].get(timeout=120)

    def quiet(self, rounds: int) -> list[float]:
        """Seconds to the first token of a request now and then."""
        waits = []
        for _ in range(rounds):
            account = self.ask(b"quiet", 384, 4).account
            assert account is not None and account.ttft_seconds is not None
            waits.append(account.ttft_seconds)
            time.sleep(0.2)
        return waits


def percentile(waits: list[float]) -> float:
    return sorted(waits)[int(0.95 * len(waits))]


def test_a_flood_at_most_doubles_a_quiet_tenants_wait(small_model: Path) -> None:
    model = HostedModel("m", load(small_model, default_dtype()), load_tokenizer(small_model), 600, 512)
    clients = Clients(model)
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            clients.ask(b"flood", 256, 32)

    def attempt() -> float:
        over.clear()
        threads = [threading.Thread(target=flood) for _ in range(FLOOD)]
        clients.quiet(1)
        alone = percentile(clients.quiet(ROUNDS))
        for thread in threads:
            thread.start()
        clients.quiet(1)  # the first one finds a step in progress that reckoned with nobody
        together = percentile(clients.quiet(ROUNDS))
        over.set()
        for thread in threads:
            thread.join()
        print(f"p95 to the first token: {alone:.3f} s alone, {together:.3f} s beside {FLOOD} of another tenant")
        return together / alone

    try:
        assert any(attempt() <= 2 for _ in range(ATTEMPTS))
    finally:
        over.set()
        clients.core.stop()
