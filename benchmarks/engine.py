"""The engine beside transformers `generate`: decode, concurrency and prefix reuse, in one run on one machine.

`python -m benchmarks.engine [--model NAME] [--quick] [--json FILE]`. Repetitions of the two systems alternate, so that
a machine that drifts drifts for both.
"""

import argparse
import asyncio
import random
from pathlib import Path

from benchmarks.engine_server import complete_all, engine
from benchmarks.report import Report, Row
from benchmarks.transformers_peer import Peer, transformers
from engine.catalog import pull

PACKAGES = ("farthing", "torch", "transformers", "gguf")
CONCURRENT = 16
FARTHING, PEER = "farthing", "transformers generate, bf16"
DECODE, MANY, REUSE = "1 request, 64 in, 128 out", "16 requests, 64 in, 64 out", "1,024 in, 1 out"


def prompts(seed: int, count: int, length: int) -> list[list[int]]:
    """Random token ids, the same for both systems, past the special tokens of every tokenizer in the catalogue."""
    draw = random.Random(seed)
    return [[draw.randrange(1_000, 40_000) for _ in range(length)] for _ in range(count)]


class Run:
    """Measurements of one pair of running systems, a list of values for each figure."""

    def __init__(self, url: str, model: str, peer: Peer) -> None:
        self.url, self.model, self.peer = url, model, peer
        self.values: dict[tuple[str, str, str, str], list[float]] = {}

    def add(self, workload: str, system: str, metric: str, unit: str, value: float) -> None:
        self.values.setdefault((workload, system, metric, unit), []).append(value)

    def decode(self, seed: int, tokens: int) -> None:
        prompt = prompts(seed, 1, 64)
        (answer,), _ = asyncio.run(complete_all(self.url, self.model, prompt, tokens))
        self.add(DECODE, FARTHING, "decode", "tok/s", (tokens - 1) / (answer.last - answer.first))
        first = self.peer.generate(prompt, 1)
        whole = self.peer.generate(prompt, tokens)
        self.add(DECODE, PEER, "decode", "tok/s", (tokens - 1) / (whole - first))

    def many(self, seed: int, tokens: int, sequential: int) -> None:
        """`sequential`: how many of the 16 the one-at-a-time figures are taken from (they are slow)."""
        batch = prompts(seed, CONCURRENT, 64)
        _, wall = asyncio.run(complete_all(self.url, self.model, batch, tokens))
        self.add(MANY, FARTHING, "16 at once", "tok/s", CONCURRENT * tokens / wall)
        alone = prompts(seed + 1, sequential, 64)
        walls = [asyncio.run(complete_all(self.url, self.model, [prompt], tokens))[1] for prompt in alone]
        self.add(MANY, FARTHING, "one at a time", "tok/s", sequential * tokens / sum(walls))
        walls = [self.peer.generate([prompt], tokens) for prompt in alone]
        self.add(MANY, PEER, "one at a time", "tok/s", sequential * tokens / sum(walls))
        self.add(MANY, PEER, "static batch of 16", "tok/s", CONCURRENT * tokens / self.peer.generate(batch, tokens))

    def reuse(self, seed: int) -> None:
        prompt = prompts(seed, 1, 1024)
        for metric in ("first arrival", "second arrival"):
            (answer,), _ = asyncio.run(complete_all(self.url, self.model, prompt, 1))
            self.add(REUSE, FARTHING, f"time to first token, {metric}", "ms", answer.first * 1e3)
        self.add(REUSE, FARTHING, "cached tokens, second arrival", "tokens", answer.cached_tokens)
        self.add(REUSE, PEER, "time to first token, first arrival", "ms", self.peer.generate(prompt, 1) * 1e3)


def ratios(report: Report) -> None:
    value = report.value
    first, second = (value(REUSE, FARTHING, f"time to first token, {n} arrival") for n in ("first", "second"))
    many = value(MANY, FARTHING, "16 at once")
    measured = {
        "decode_b1": (value(DECODE, FARTHING, "decode") / value(DECODE, PEER, "decode"), "2"),
        "concurrent_16": (many / value(MANY, PEER, "one at a time"), "6"),
        "concurrent_16_over_own_one_at_a_time": (many / value(MANY, FARTHING, "one at a time"), ""),
        "concurrent_16_over_static_batch": (many / value(MANY, PEER, "static batch of 16"), ""),
        "ttft_1024_second_arrival": (first / second, "8"),
        "ttft_1024_first_arrival": (value(REUSE, PEER, "time to first token, first arrival") / first, ""),
    }
    report.ratios = {name: ratio for name, (ratio, _) in measured.items()}
    report.targets = {name: target for name, (_, target) in measured.items() if target}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a name from the catalogue (Llama or Qwen2)")
    parser.add_argument("--dtype", default="int8", help="the engine's; transformers runs bf16")
    parser.add_argument("--quick", action="store_true", help="one repetition, about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there instead of printing them")
    options = parser.parse_args()
    path = pull(options.model)
    repeats = 1 if options.quick else 3
    report = Report()
    with engine(options.model, options.dtype) as (url, ready), transformers(path) as peer:
        run = Run(url, options.model, peer)
        asyncio.run(complete_all(url, options.model, prompts(0, 1, 64), 8))  # first-use costs belong to neither
        peer.generate(prompts(0, 1, 64), 8)
        for repeat in range(repeats):
            run.decode(100 + repeat, 128)
            run.many(200 + 10 * repeat, 64, sequential=2 if options.quick else 4)
            run.reuse(300 + repeat)
    report.rows = [Row.of(w, s, m, values, unit) for (w, s, m, unit), values in run.values.items()]
    report.rows.append(Row.of("start", FARTHING, "ready", [ready], "s"))
    ratios(report)
    report.notes.append(f"model {options.model}, engine dtype {options.dtype}; ratios are of medians")
    report.emit(options.json, PACKAGES)


if __name__ == "__main__":
    main()
