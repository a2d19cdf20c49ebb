"""Farthing beside LiteLLM's proxy and Portkey's gateway, in front of the same upstream: what a request costs and waits.

`python -m benchmarks.gateway [--peers …] [--only …] [--repeats N] [--quick] [--json FILE]`. Each gateway runs alone on
the last core; the upstream, the load and Farthing's PostgreSQL share another. Farthing checks keys, holds money
under four hard budgets and writes every operation down; the peers do nothing of that. Each repetition starts all of
them anew, in turn. `python -m benchmarks.peers install litellm portkey` gets the peers.
"""

import argparse
import contextlib
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks import gateway_peers, options, peer_install
from benchmarks.gateway_load import Load
from benchmarks.gateway_peers import Gateway
from benchmarks.gateway_workloads import FLUSH, FULL, QUICK, WORKLOADS, Figure, Measured, Sizes, applies
from benchmarks.report import Report, Row
from benchmarks.servers import Foreign, Running, start

PACKAGES = ("farthing", "litestar", "uvicorn", "uvloop", "msgspec")
COSTS = {"requests": "requests, 32 at once", "streams": "streams of 20 chunks, 16 at once"}
SOAKED = ("memory after 20%", "memory after 100%")
TARGETS = {"litellm": "30", "portkey": "3"}

Found = dict[tuple[str, str], float]
"""(workload, metric) -> value"""


@dataclass
class Run:
    """One run over all gateways, and every figure so far by its place in the report."""

    upstream: Running
    sizes: Sizes
    only: Sequence[str]
    repeats: int
    values: dict[tuple[str, str, str, str], list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    foreign: dict[str, list[float]] = field(default_factory=dict)

    def all(self, gateways: Sequence[Gateway]) -> None:
        for repeat in range(self.repeats):
            bare = self._measure(Gateway(gateway_peers.upstream(), {}), self.upstream, repeat, {})
            for gateway in gateways:
                name = gateway.system.name
                if name in self.failed:
                    continue
                try:
                    with start(gateway.system) as running:
                        foreign = Foreign(running.pid)
                        self._measure(gateway, running, repeat, bare)
                        self._add(gateway, Figure("server", "ready", running.ready, "s"))
                        self.foreign.setdefault(name, []).append(foreign.cores())
                except (RuntimeError, TimeoutError, OSError) as error:
                    self.failed[name] = str(error) or type(error).__name__
                    say(f"{name} failed: {self.failed[name]}")

    def _measure(self, gateway: Gateway, running: Running, repeat: int, bare: Found) -> Found:
        """What this repetition found."""
        say(f"{gateway.system.name}, repetition {repeat + 1} of {self.repeats}")
        names = [name for name in self.only if applies(name, gateway.system.family, repeat)]
        found = uvloop.run(self._workloads(gateway, running, names, bare))
        return {(figure.workload, figure.metric): figure.value for figure in found}

    async def _workloads(self, gateway: Gateway, running: Running, names: Sequence[str], bare: Found) -> list[Figure]:
        load = Load(running.url, gateway.system.model, gateway.headers)
        await load.check()
        for stream in (False, True):
            await load.at_once(4, stream, lambda count: count < 100)  # first-use costs
        one = Measured(gateway, running, self.upstream.url, load, self.sizes, bare)
        found = []
        for name in names:
            for figure in await WORKLOADS[name](one):
                say(f"  {figure.workload}: {figure.metric} {figure.value:,.3g} {figure.unit}")
                self._add(gateway, figure)
                found.append(figure)
        return found

    def _add(self, gateway: Gateway, figure: Figure) -> None:
        place = (figure.workload, gateway.system.name, figure.metric, figure.unit)
        self.values.setdefault(place, []).append(figure.value)

    def report(self) -> Report:
        report = Report(versions=peer_install.versions(*gateway_peers.PEERS))
        report.rows = [Row.of(w, s, m, values, unit) for (w, s, m, unit), values in self.values.items()]
        compare(report, {(w, s, m): statistics.median(v) for (w, s, m, _), v in self.values.items()})
        cores = ", ".join(f"{name} {max(busy):.1f}" for name, busy in self.foreign.items())
        report.notes.append(f"cores that the load, the upstream, PostgreSQL and others kept busy, at most: {cores}")
        report.notes += [f"Failed: {name}: {why}" for name, why in self.failed.items()]
        return report


def compare(report: Report, medians: dict[tuple[str, str, str], float]) -> None:
    """A peer's CPU time for a request over ours: how many times as many of them a core of ours answers."""
    for peer, target in TARGETS.items():
        for what, workload in COSTS.items():
            mine, theirs = (medians.get((workload, name, "CPU for 1,000")) for name in ("farthing", peer))
            if mine and theirs:
                name = f"{peer}_{what}_per_cpu_s"
                report.ratios[name], report.targets[name] = theirs / mine, target
                report.basis[name] = f"{peer} {theirs:.3g} s / farthing {mine:.3g} s of CPU for 1,000"
    own = {
        "added_p50_ms": (("50 requests a second", "farthing", "added p50"), "<1.5"),
        "streams_3000_mib": (("memory", "farthing", "3,000 open streams"), "<400"),
    }
    for name, (place, target) in own.items():
        if (value := medians.get(place)) is not None:
            report.ratios[name], report.targets[name], report.basis[name] = value, target, "farthing"
    soak = [value for (_, system, metric), value in medians.items() if system == "farthing" and metric in SOAKED]
    if len(soak) == 2:
        report.ratios["memory_growth"], report.targets["memory_growth"] = soak[1] / soak[0], "<1.05"
        report.basis["memory_growth"] = f"farthing: {SOAKED[1]} over {SOAKED[0]}"
    added, flush = (medians.get(("50 requests a second", "farthing", name)) for name in ("added p50", FLUSH))
    if added is not None and flush is not None:
        report.ratios["added_p50_without_flush_ms"] = added - flush
        report.basis["added_p50_without_flush_ms"] = f"farthing; the disk alone takes {flush:.2f} ms to keep a row"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def gateways(url: str, peers: Sequence[str], core: int) -> Iterator[list[Gateway]]:
    with tempfile.TemporaryDirectory() as folder, gateway_peers.farthing(url, Path(folder), core) as ours:
        found = [ours]
        if "litellm" in peers:
            found.append(gateway_peers.litellm(url, Path(folder), core))
        if "portkey" in peers:
            found.append(gateway_peers.portkey(url, core))
        yield found


def main() -> int:
    chosen = arguments()
    # A gateway waits for its disk, and a virtual disk's interrupts often go to the last core.
    *others, last = sorted(os.sched_getaffinity(0))
    if not others:
        say("gateways are measured on one core and loaded from another: this machine has only one")
        return 2
    os.sched_setaffinity(0, others[:1])  # what this starts inherits it; a gateway is moved to the last core
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # 3,000 streams are 6,000 sockets in a gateway
    missing = [line for peer in chosen.peers if (line := gateway_peers.lacking(peer))]
    for line in missing:
        say(f"Not measured: {line}")
    peers = [peer for peer in chosen.peers if not gateway_peers.lacking(peer)]
    with start(gateway_peers.upstream()) as upstream:
        repeats = 1 if chosen.quick else chosen.repeats
        run = Run(upstream, QUICK if chosen.quick else FULL, chosen.only, repeats)
        try:
            with gateways(upstream.url, peers, last) as found:
                run.all(found)
        except (KeyboardInterrupt, SystemExit):
            run.failed["the run"] = "interrupted"
    os.sched_setaffinity(0, [*others, last])  # the report tells how many there are
    report = run.report()
    report.notes.insert(0, f"gateways on one core, {repeats} repetition(s); ratios are of medians")
    report.notes += [f"Not measured: {line}" for line in missing]
    report.emit(chosen.json, PACKAGES)
    return 1 if run.failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=(__doc__ or "").splitlines()[0])
    names = ", ".join(gateway_peers.PEERS)
    parser.add_argument(
        "--peers", type=options.listed, default=list(gateway_peers.PEERS), help=f"any of {names}, or none"
    )
    options.add_common(parser, WORKLOADS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
