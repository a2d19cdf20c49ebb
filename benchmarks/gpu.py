"""`python -m benchmarks.gpu`: the Triton backend on this machine's GPU, correctness first, then speed against limits.

Each kernel's bytes and operations are counted as its comment says. The limits are measured on the same device: bytes a
second of a large copy, operations a second of a large bfloat16 product.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.report import ROOT, Report, Row
from engine.backends.triton import TritonBackend
from engine.batch import BLOCK_TOKENS, FlatBatch, ModelConfig
from engine.layers.rope import Rope
from engine.models.decoder import Decoder, Layer
from engine.runner import ModelRunner

REPEATS = 5
PACKAGES = ("torch", "triton")


@dataclass(frozen=True)
class Sizes:
    """Of a model and a load; the standard ones are Llama 3.1 8B's layer and Llama 3.2 1B's whole model."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256
    sequences: int = 64
    context: int = 4096
    prompt: int = 2048


@dataclass(frozen=True)
class Work:
    """One operation: what it reads and writes in bytes, and its floating point operations where they are the limit."""

    name: str
    run: Callable[[], object]
    bytes: int
    flops: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report to this file instead of printing it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU: torch sees no NVIDIA or AMD device here (a CPU build of torch sees none).", file=sys.stderr)
        return 1
    for part in ("kernels.py", "model.py"):
        check = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/engine/device/{part}"]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        if subprocess.run(check, cwd=ROOT, env=environment).returncode:
            print(f"Wrong results on this GPU: see the failures of tests/engine/device/{part} above.", file=sys.stderr)
            return 1
    device = torch.device("cuda")
    report = Report(notes=[f"on {torch.cuda.get_device_name(device)}"])
    with torch.inference_mode():
        backend = TritonBackend(torch.bfloat16, device)
        measure(report, limits(device) + kernels(backend, Sizes()), timed)
        decode(report, backend, timed)
    report.emit(options.json, PACKAGES)
    return 0


def timed(run: Callable[[], object], calls: int = 20) -> list[float]:
    """Seconds of one call, REPEATS times over, after one for the compiler."""
    run()
    seconds = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000 / calls)
    return seconds


def limits(device: torch.device, size: int = 1 << 30, side: int = 8192) -> list[Work]:
    """A copy of `size` bytes, and a product of two square matrices."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return [
        Work("copy", lambda: target.copy_(source), 2 * size),
        Work("product", lambda: a @ b, 3 * 2 * side**2, 2 * side**3),
    ]


def measure(report: Report, works: list[Work], timer: Callable[[Callable[[], object]], list[float]]) -> None:
    """Rows of speed, and each kernel's ratio to the limit that binds it: "copy" and "product" come first in `works`."""
    for work in works:
        seconds = timer(work.run)
        gigabytes = [work.bytes / value / 1e9 for value in seconds]
        report.rows.append(Row.of(work.name, "triton", "time", [value * 1e6 for value in seconds], "us"))
        report.rows.append(Row.of(work.name, "triton", "bandwidth", gigabytes, "GB/s"))
        if work.flops:
            teraflops = [work.flops / value / 1e12 for value in seconds]
            report.rows.append(Row.of(work.name, "triton", "speed", teraflops, "TFLOP/s"))
        if work.name not in ("copy", "product"):
            limit, metric = ("product", "speed") if work.flops else ("copy", "bandwidth")
            name = f"{work.name}_{metric}_over_{limit}"
            report.ratios[name] = report.value(work.name, "triton", metric) / report.value(limit, "triton", metric)


def kernels(backend: TritonBackend, sizes: Sizes) -> list[Work]:
    """Every kernel at the sizes of a large decoding step, and attention over a whole prompt too."""
    device, dtype, wide = backend.device, backend.kv_dtype, 2
    tokens, size = sizes.sequences, sizes.head_dim
    all_heads = sizes.heads + 2 * sizes.kv_heads

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, delta, weight = random(tokens, sizes.hidden), random(tokens, sizes.hidden), torch.ones(sizes.hidden).to(device)
    gate_up = random(tokens, 2 * sizes.intermediate)
    blocks = sizes.sequences * -(-sizes.context // BLOCK_TOKENS)
    decoding, prompt = (
        flat(device, *load, blocks) for load in ((sizes.sequences, 1, sizes.context), (1, sizes.prompt, sizes.prompt))
    )
    pool = backend.new_kv(blocks * BLOCK_TOKENS, sizes.kv_heads, size)
    pool.normal_()
    mixed, long = random(tokens, all_heads, size), random(sizes.prompt, all_heads, size)
    rotations = torch.polar(torch.ones(tokens, 1, size // 2), torch.randn(tokens, 1, size // 2)).to(device)
    plans = backend.plan(decoding), backend.plan(prompt)
    logits = torch.randn(tokens, sizes.vocabulary, device=device)
    every, all_tokens = torch.ones(tokens, device=device), torch.full((tokens,), sizes.vocabulary, device=device)

    def choose(temperature: float, top_k: torch.Tensor, top_p: float) -> Callable[[], object]:
        return lambda: backend.choose(logits, every * temperature, top_k, every * top_p, every * 0, every / 2)

    rows, seen = tokens * sizes.hidden * wide, sizes.prompt * (sizes.prompt + 1) // 2
    scale = size**-0.5
    return [
        Work("add_rms_norm", lambda: backend.add_rms_norm(x, delta, weight, 1e-5), 4 * rows),
        Work("gate", lambda: backend.gate(gate_up, "silu"), 3 * tokens * sizes.intermediate * wide),
        Work(
            "rotate_and_store",
            lambda: backend.rotate_and_store(mixed, sizes.heads, None, rotations, pool, plans[0]),
            2 * mixed.numel() * wide + tokens * size * 4,
        ),
        Work(
            "attend_decoding",
            lambda: backend.attend(mixed[:, : sizes.heads], pool, plans[0], scale, None, None),
            tokens * wide * size * (2 * sizes.kv_heads * sizes.context + 2 * sizes.heads),
        ),
        Work(
            "attend_prompt",
            lambda: backend.attend(long[:, : sizes.heads], pool, plans[1], scale, None, None),
            sizes.prompt * wide * size * (2 * sizes.kv_heads + 2 * sizes.heads),
            4 * sizes.heads * size * seen,
        ),
        Work("choose_greedy", choose(0, all_tokens, 1), logits.numel() * 4),
        Work("choose_top_p", choose(1, all_tokens, 0.95), logits.numel() * 4),
        Work("choose_top_k_top_p", choose(1, torch.full_like(all_tokens, 50), 0.95), logits.numel() * 4),
    ]


def flat(device: torch.device, sequences: int, new: int, context: int, blocks: int) -> FlatBatch:
    """`sequences` with `new` last tokens of `context` each, over scattered blocks."""
    width = -(-context // BLOCK_TOKENS)
    tables = torch.randperm(blocks)[: sequences * width].view(sequences, width)
    positions = torch.arange(context - new, context).repeat(sequences)
    owners = torch.arange(sequences).repeat_interleave(new)
    return FlatBatch(
        token_ids=torch.zeros(sequences * new, dtype=torch.int64).to(device),
        positions=positions.to(device),
        slot_mapping=(tables[owners, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS).to(device),
        query_starts=tuple(range(0, sequences * new + 1, new)),
        context_lens=(context,) * sequences,
        block_tables=tables.int().to(device),
        logits_rows=torch.arange(new - 1, sequences * new, new).to(device),
    )


def decode(
    report: Report,
    backend: TritonBackend,
    timer: Callable[[Callable[[], object]], list[float]],
    config: ModelConfig | None = None,
    loads: tuple[int, ...] = (1, 32, 128),
    context: int = 1024,
) -> None:
    """Whole decoding steps with the greedy choice, of a model with random weights, at several numbers of requests."""
    config = config or ModelConfig("llama", 128256, 16, 2048, 8192, 32, 8, 64, 131072, 1e-5, 5e5, True)
    decoder, weight_bytes = random_decoder(backend, config)
    runner = ModelRunner(decoder, backend)
    width = -(-context // BLOCK_TOKENS)
    runner.allocate(max(loads) * width)
    copy = report.value("copy", "triton", "bandwidth")
    for sequences in loads:
        batch = flat(backend.device, sequences, 1, context, max(loads) * width)
        seconds = timer(partial(greedy_step, runner, batch))
        moved = weight_bytes + sequences * width * runner.block_bytes
        name = f"decode_{sequences}"
        report.rows.append(Row.of(name, "triton", "speed", [sequences / value for value in seconds], "tok/s"))
        report.rows.append(Row.of(name, "triton", "bandwidth", [moved / value / 1e9 for value in seconds], "GB/s"))
        report.ratios[f"{name}_bandwidth_over_copy"] = report.value(name, "triton", "bandwidth") / copy


def greedy_step(runner: ModelRunner, batch: FlatBatch) -> torch.Tensor:
    return runner.forward(batch).argmax(-1)


def random_decoder(backend: TritonBackend, config: ModelConfig) -> tuple[Decoder, int]:
    """A Llama with tied embeddings, and the bytes of weights that one step reads."""
    numbers, hidden, size = 0, config.hidden_size, config.head_dim

    def weight(out: int, inner: int) -> torch.Tensor:
        nonlocal numbers
        numbers += out * inner
        return torch.randn(out, inner, device=backend.device).mul_(inner**-0.5)

    ones = torch.ones(hidden)
    layers = tuple(
        Layer(
            attn_norm=ones,
            qkv=backend.linear(weight((config.num_heads + 2 * config.num_kv_heads) * size, hidden)),
            output=backend.linear(weight(hidden, config.num_heads * size)),
            ffn_norm=ones,
            gate_up=backend.linear(weight(2 * config.intermediate_size, hidden)),
            down=backend.linear(weight(hidden, config.intermediate_size)),
        )
        for _ in range(config.num_layers)
    )
    table = weight(config.vocab_size, hidden)
    head = backend.head(table)
    rope = Rope(config.rope_theta ** (-torch.arange(0, size, 2) / size))
    decoder = Decoder(config, layers, backend.embedding(table, head), ones, head, (rope,), size**-0.5)
    return decoder, numbers * backend.kv_dtype.itemsize


if __name__ == "__main__":
    sys.exit(main())
