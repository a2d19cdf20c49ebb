"""What gateways are measured by: what a request and a stream cost, what they are delayed by, what memory they take."""

import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import gt
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.gateway_load import Load, quantile
from benchmarks.gateway_peers import Gateway
from benchmarks.gateway_upstream import CHUNKS
from benchmarks.servers import Running, cpu_seconds

MIB = 2**20
FLUSH = "the disk's own flush p50"
ROW_BYTES = 1024
"""About what an operation with one attempt has in the spool."""


@dataclass(frozen=True)
class Sizes:
    seconds: float
    """Of each load."""
    streams: int
    """Open at the same time."""
    operations: int
    """Of the soak."""


FULL = Sizes(8.0, 3_000, 100_000)
QUICK = Sizes(2.0, 300, 3_000)


class Figure(NamedTuple):
    workload: str
    metric: str
    value: float
    unit: str


@dataclass(frozen=True)
class Measured:
    """One gateway that runs. `bare` holds the upstream's own delays, (workload, metric) -> ms."""

    gateway: Gateway
    running: Running
    upstream: str
    load: Load
    sizes: Sizes
    bare: Mapping[tuple[str, str], float]

    def memory(self) -> float:
        return self.running.shared_out_memory() / MIB

    def database(self) -> int | None:
        """PostgreSQL's process, where there is one."""
        folder = self.gateway.database
        return int((folder / "postmaster.pid").read_text().split()[0]) if folder else None


Workload = Callable[[Measured], Awaitable[list[Figure]]]


async def requests(one: Measured) -> list[Figure]:
    return await _saturated(one, "requests, 32 at once", 32, stream=False)


async def streams(one: Measured) -> list[Figure]:
    return await _saturated(one, f"streams of {CHUNKS} chunks, 16 at once", 16, stream=True)


async def _saturated(one: Measured, workload: str, connections: int, stream: bool) -> list[Figure]:
    """CPU time is the gateway's own, with what it has its kernel do; the database's stands beside it."""
    pids = {"CPU": one.running.pid, "CPU of PostgreSQL": one.database()}
    before = {name: cpu_seconds(pid) for name, pid in pids.items() if pid}
    began = time.perf_counter()
    end = began + one.sizes.seconds
    answered = await one.load.at_once(connections, stream, lambda _: time.perf_counter() < end)
    elapsed = time.perf_counter() - began
    figures = [Figure(workload, "answered", answered / elapsed, "/s")]
    for name, seconds in before.items():
        pid = pids[name]
        assert pid is not None
        used = cpu_seconds(pid) - seconds
        figures.append(Figure(workload, f"{name} for 1,000", used / answered * 1000, "s"))
    return figures


async def delay(one: Measured) -> list[Figure]:
    return await _delayed(one, "requests", stream=False)


async def stream_delay(one: Measured) -> list[Figure]:
    return await _delayed(one, "streams", stream=True)


async def _delayed(one: Measured, what: str, stream: bool) -> list[Figure]:
    figures = []
    for rate in one.gateway.rates:
        samples = await one.load.at_rate(rate, one.sizes.seconds, stream)
        kinds = {"first text": samples.first, "whole": samples.whole} if stream else {"": samples.whole}
        for kind, values in kinds.items():
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                metric, value = f"{kind} {name}".strip(), quantile(values, share) * 1000
                workload = f"{rate} {what} a second"
                figures.append(Figure(workload, metric, value, "ms"))
                if (bare := one.bare.get((workload, metric))) is not None:
                    figures.append(Figure(workload, f"added {metric}", value - bare, "ms"))
        if one.gateway.durable is not None and not stream:
            flush = quantile(_flushes(one.gateway.durable, rate, one.sizes.seconds / 2), 0.5) * 1000
            figures.append(Figure(f"{rate} {what} a second", FLUSH, flush, "ms"))
    return figures


def _flushes(folder: Path, rate: int, seconds: float) -> list[float]:
    """Seconds that the disk takes by itself for what a row is to it: so many appends a second, each flushed."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began, taken = time.perf_counter(), []
        for number in range(int(rate * seconds)):
            time.sleep(max(began + number / rate - time.perf_counter(), 0))
            start = time.perf_counter()
            file.write(bytes(ROW_BYTES))
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - start)
        return taken


async def memory(one: Measured) -> list[Figure]:
    """After all the loads before it, then with streams open that wait for their upstream."""
    figures = [Figure("memory", "after the load", one.memory(), "MiB")]
    if one.gateway.opens:

        def meanwhile() -> None:
            figures.append(Figure("memory", f"{one.sizes.streams:,} open streams", one.memory(), "MiB"))
            httpx.post(f"{one.upstream}/release", timeout=60, trust_env=False).raise_for_status()

        await one.load.hold(one.sizes.streams, meanwhile)
    return figures


async def soak(one: Measured) -> list[Figure]:
    """Requests and streams by turns: the memory of a gateway must not grow with what it has answered."""
    workload, answered = f"{one.sizes.operations:,} operations", 0
    figures = []
    for part in range(1, 11):
        goal = one.sizes.operations * part // 10 - answered
        answered += await one.load.at_once(32, part % 2 == 0, partial(gt, goal))
        if part in (2, 10):
            figures.append(Figure(workload, f"memory after {part}0%", one.memory(), "MiB"))
    return figures


WORKLOADS: dict[str, Workload] = {
    "requests": requests,
    "streams": streams,
    "delay": delay,
    "stream_delay": stream_delay,
    "memory": memory,
    "soak": soak,
}


def applies(workload: str, family: str, repeat: int) -> bool:
    """The soak is for us, once; the bare upstream is what costs and delays are compared with."""
    if workload == "soak":
        return family == "farthing" and repeat == 0
    return family != "upstream" or workload != "memory"
