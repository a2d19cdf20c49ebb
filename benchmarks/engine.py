"""The engine beside llama.cpp, vLLM and transformers: each a real server over HTTP, same model, same prompts, one run.

`python -m benchmarks.engine [--model NAME] [--peers …] [--only …] [--quick] [--json FILE]`. Servers run one at a time,
since each takes all cores. Each repetition starts them anew, in turn, so that a machine that drifts drifts for all; the
one that takes minutes to start (vLLM) is measured in one go. A peer that needs many times as long for a workload as
Farthing did is stopped there, which the notes say. `python -m benchmarks.peers install` gets the peers.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from benchmarks import options, peer_install, peers
from benchmarks.client import Client
from benchmarks.compare import compare
from benchmarks.report import Report, Row
from benchmarks.servers import Foreign, Running, System, start
from benchmarks.workloads import FULL, QUICK, WORKLOADS, Figure, Sizes, Words
from engine.catalog import pull
from engine.tokenizer import Tokenizer, load_tokenizer

PACKAGES = ("farthing", "torch", "transformers", "gguf")
SERVER = "server"
UNCACHED = ("decode", "throughput", "ttft")
"""The workloads after which peak memory is read: later ones fill prefix caches, which systems size differently."""
PATIENCE, LEAST_PATIENCE = 5, 20.0
"""A peer gets so many times what Farthing's slowest took for a workload, and at least so many seconds."""


class TooLongError(Exception):
    """A peer was stopped in a workload; the server still works on it and has to go."""


@dataclass
class Run:
    """One run over all systems: what to ask, and every figure so far by its place in the report."""

    tokenizer: Tokenizer
    sizes: Sizes
    only: Sequence[str]
    repeats: int
    values: dict[tuple[str, str, str, str], list[float]] = field(default_factory=dict)
    keyed: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """(system, key) -> the values of figures that systems are compared by."""
    failed: dict[str, str] = field(default_factory=dict)
    """System -> why it is measured no further."""
    foreign: dict[str, list[float]] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    """Workload -> seconds that Farthing needed for it at most."""
    stopped: dict[tuple[str, str], float] = field(default_factory=dict)
    """(system, workload) -> seconds after which it was stopped."""

    def add(self, system: System, figure: Figure) -> None:
        self.values.setdefault((figure.workload, system.name, figure.metric, figure.unit), []).append(figure.value)
        if figure.key:
            self.keyed.setdefault((system.name, figure.key), []).append(figure.value)

    def all(self, systems: Sequence[System]) -> None:
        for system in systems:
            if system.family == "farthing":
                self._first(system)
        for repeat in range(self.repeats):
            for system in systems:
                if not (system.slow_start and repeat):
                    self._try(system, range(self.repeats) if system.slow_start else (repeat,))

    def _try(self, system: System, repeats: Sequence[int]) -> None:
        """All of `repeats`, in one start unless a workload is stopped; what fails is kept, and the others go on."""
        waiting = [(repeat, name) for repeat in repeats for name in self.only]
        while system.name not in self.failed:
            waiting = [one for one in waiting if (system.name, one[1]) not in self.stopped]
            if not waiting:
                return
            try:
                self._start(system, waiting)
            except TooLongError as error:
                say(f"  {error}")
            except (RuntimeError, httpx.HTTPError) as error:
                self.failed[system.name] = str(error) or type(error).__name__
                say(f"{system.name} failed: {self.failed[system.name]}")

    def _first(self, system: System) -> None:
        """A first start builds kernels and packs weights, which later ones find."""
        try:
            with start(system):
                pass
        except RuntimeError as error:
            self.failed[system.name] = str(error)
            say(f"{system.name} failed: {error}")

    def _start(self, system: System, waiting: list[tuple[int, str]]) -> None:
        """Start `system` and take from `waiting` what it ran, until that is empty. Raises TooLongError."""
        with start(system) as running:
            foreign = Foreign(running.pid)
            asyncio.run(self._workloads(system, running, waiting))
            self.add(system, Figure("ready", SERVER, "ready", "s", running.ready))
            self.foreign.setdefault(system.name, []).append(foreign.cores())

    async def _workloads(self, system: System, running: Running, waiting: list[tuple[int, str]]) -> None:
        """Prompts depend on the workload and the repetition alone, never on the system."""
        async with Client(running.url, system.model) as client:
            await client.together([Words(self.tokenizer, 0).ids(300)] * 2, 8)  # first-use costs
            uncached = 0
            while waiting:
                repeat, name = waiting.pop(0)
                say(f"{system.name}: {name}, repetition {repeat + 1} of {self.repeats}")
                for figure in await self._workload(system, client, repeat, name):
                    say(f"  {figure.workload}: {figure.metric} {figure.value:,.1f} {figure.unit}")
                    self.add(system, figure)
                if name in UNCACHED:
                    uncached = running.peak_memory()
        if uncached:
            self.add(system, _memory("memory", "peak memory", uncached))
        self.add(system, _memory("", "peak memory, all workloads", running.peak_memory()))
        self.add(system, _memory("", "memory at the end, shared out", running.shared_out_memory()))

    async def _workload(self, system: System, client: Client, repeat: int, name: str) -> list[Figure]:
        ours = system.family == "farthing"
        limit = None if ours or name not in self.longest else max(LEAST_PATIENCE, PATIENCE * self.longest[name])
        words = Words(self.tokenizer, 1_000 * (repeat + 1) + list(WORKLOADS).index(name))
        began = time.perf_counter()
        try:
            async with asyncio.timeout(limit):
                figures = await WORKLOADS[name](client, words, self.sizes)
        except TimeoutError:
            assert limit is not None
            self.stopped[system.name, name] = limit
            raise TooLongError(f"stopped after {limit:.0f} s") from None
        if ours:
            self.longest[name] = max(self.longest.get(name, 0.0), time.perf_counter() - began)
        return figures

    def report(self, systems: Sequence[System]) -> Report:
        report = Report(versions=peer_install.versions(*peers.FAMILIES))
        report.rows = [Row.of(w, s, m, values, unit) for (w, s, m, unit), values in self.values.items()]
        report.rows.sort(key=lambda row: (row.workload == SERVER, row.workload, row.metric))
        compare(report, systems, self.keyed)
        cores = ", ".join(f"{name} {max(busy):.1f}" for name, busy in self.foreign.items())
        report.notes += [
            f"{system} was stopped in {name} after {seconds:.0f} s; Farthing's slowest took {self.longest[name]:.1f} s"
            for (system, name), seconds in self.stopped.items()
        ]
        report.notes.append(f"cores that other processes kept busy meanwhile, at most: {cores}")
        return report


def _memory(key: str, metric: str, size: int) -> Figure:
    return Figure(key, SERVER, metric, "MiB", size / 2**20)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    chosen = arguments()
    path = pull(chosen.model)
    ours, missing = peers.farthing(chosen.model, path, chosen.dtype)
    theirs, missing_peers = peers.found(chosen.model, path, chosen.peers)
    systems = [*ours, *theirs]
    for line in (missing := missing + missing_peers):
        say(f"Not measured: {line}")
    sizes = QUICK if chosen.quick else FULL
    run = Run(load_tokenizer(path), sizes, chosen.only, 1 if chosen.quick else chosen.repeats)
    try:
        run.all(systems)
    except (KeyboardInterrupt, SystemExit):  # what was measured until then took an hour: it is still shown
        run.failed["the run"] = "interrupted"
    report = run.report(systems)
    report.notes.insert(
        0, f"model {chosen.model}, beside its peers, {run.repeats} repetition(s); ratios are of medians"
    )
    report.notes += [f"Not measured: {line}" for line in missing]
    report.notes += [f"Failed: {name}: {why}" for name, why in run.failed.items()]
    report.emit(chosen.json, PACKAGES)
    return 1 if run.failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a name from the catalogue (Llama or Qwen2)")
    parser.add_argument(
        "--dtype", type=options.listed, default=["int8", "int4"], help="the engine's; int8+kv8 is int8 with KV in int8"
    )
    families = ", ".join(peers.FAMILIES)
    parser.add_argument(
        "--peers",
        type=options.listed,
        default=list(peers.FAMILIES),
        help=f"any of {families}, or one system like 'llama.cpp q8_0'",
    )
    options.add_common(parser, WORKLOADS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
