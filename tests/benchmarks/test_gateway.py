"""The gateway's benchmark: its load on its upstream, its ratios, and a run of it on the real gateway and PostgreSQL."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks import gateway, gateway_peers, gateway_workloads
from benchmarks.gateway_load import FailedRequestError, Load
from benchmarks.report import ROOT, Report
from benchmarks.servers import start


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with start(gateway_peers.upstream()) as running:
        yield running.url


async def test_the_load_sees_whole_answers_and_streams_to_their_end(upstream: str) -> None:
    load = Load(upstream, "fake", {})
    await load.check()
    for stream in (False, True):
        assert 50 <= await load.at_once(4, stream, lambda count: count < 50) < 54
    began = time.perf_counter()
    samples = await load.at_rate(100, 0.5, stream=True)
    assert 0.45 < time.perf_counter() - began < 5 and len(samples.first) == len(samples.whole) == 50
    assert all(0 < first <= whole for first, whole in zip(samples.first, samples.whole, strict=True))


async def test_held_streams_end_once_they_are_released(upstream: str) -> None:
    load, released = Load(upstream, "fake", {}), []

    def release() -> None:
        released.append(httpx.post(f"{upstream}/release").status_code)

    await load.hold(40, release)
    assert released == [200]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 500 X\r\ncontent-length: 4\r\n\r\nnope", "500 nope"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "200"),
        (b"SSH-2.0\r\n\r\n", "not HTTP"),
        (b"", "closed"),
    ],
)
async def test_a_bad_answer_ends_the_load(answer: bytes, said: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        load = Load(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "fake", {})
        with pytest.raises(FailedRequestError, match=said):
            await load.at_once(3, False, lambda _: True)


def test_ratios_are_of_cpu_time() -> None:
    report, cpu = Report(), "CPU for 1,000"
    medians = {(gateway.COSTS["requests"], name, cpu): cost for name, cost in (("farthing", 0.5), ("litellm", 20.0))}
    gateway.compare(report, medians | {("50 requests a second", "farthing", "added p50"): 1.25})
    assert report.ratios == {"litellm_requests_per_cpu_s": 40, "added_p50_ms": 1.25}
    assert report.targets == {"litellm_requests_per_cpu_s": "30", "added_p50_ms": "<1.5"}


def test_the_disk_s_part_of_the_delay_is_told_apart() -> None:
    report, place = Report(), ("50 requests a second", "farthing")
    gateway.compare(report, {(*place, "added p50"): 1.75, (*place, gateway_workloads.FLUSH): 0.5})
    assert report.ratios == {"added_p50_ms": 1.75, "added_p50_without_flush_ms": 1.25}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_gateway_is_measured_with_its_ledger(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    command = [sys.executable, "-m", "benchmarks.gateway", "--quick", "--only", "requests,streams,delay,memory,soak"]
    env = os.environ | {"PEERS": str(tmp_path / "peers")}
    subprocess.run([*command, "--json", str(file)], cwd=ROOT, env=env, timeout=200, check=True)
    found = json.loads(file.read_text())
    assert "Not measured: litellm: not installed (python -m benchmarks.peers install litellm)" in found["notes"]
    rows = {(row["workload"], row["system"], row["metric"]): row["value"] for row in found["rows"]}
    for workload in gateway.COSTS.values():
        for metric in ("answered", "CPU for 1,000", "CPU of PostgreSQL for 1,000"):
            assert rows[workload, "farthing", metric] > 0
        assert rows[workload, "bare upstream", "answered"] > rows[workload, "farthing", "answered"]
    assert found["ratios"]["added_p50_ms"] > found["ratios"]["added_p50_without_flush_ms"]
    assert rows["memory", "farthing", "300 open streams"] > 20
    assert rows["3,000 operations", "farthing", "memory after 100%"] > 20
    assert 0.7 < found["ratios"]["memory_growth"] < 1.3
