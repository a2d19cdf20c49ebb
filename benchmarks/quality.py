"""What a number format costs in quality, beside its speed and memory: each against float32 on the same file.

`python -m benchmarks.quality [--model NAME] [--dtype …] [--data DIR] [--samples N] [--quick] [--json FILE]`. Perplexity
is on this repository's own prose. Where DIR has their files, greedy answers to GSM8K (the number is right) and
HumanEval (the tests pass; the code runs without network) are counted too, asked of the engine as a server.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import peers, perplexity, sandbox, tasks
from benchmarks.client import Client
from benchmarks.options import listed
from benchmarks.report import ROOT, Report, Row
from benchmarks.servers import System, start
from benchmarks.workloads import FULL, QUICK, Words, decode
from engine.catalog import pull
from engine.tokenizer import load_tokenizer

PACKAGES = ("farthing", "torch", "gguf")
TEXTS = ("README.md", "CONTRIBUTING.md")
REFERENCE, BASE = "float32", "bfloat16"
"""What perplexity is compared with, and what the tasks' scores are."""
DTYPES = [BASE, "int8", "int4", "int8+kv8"]
AT_ONCE = 32
MOST = {"int8": "<1.01"}
"""The most perplexity, over float32's, that a format may have."""


def prose(report: Report, path: Path, dtypes: Sequence[str], count: int) -> list[str]:
    """Perplexity of each format; returns those that this machine can run."""
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    tokens = load_tokenizer(path).encode(text, add_special=True)[:count]
    workload = f"{len(tokens):,} tokens of prose"
    reference = perplexity.load(path, REFERENCE)
    able = []
    for dtype in dtypes:
        say(f"{dtype}: perplexity")
        try:
            model = perplexity.load(path, dtype)
        except ValueError as error:
            report.notes.append(f"Not measured: {dtype}: {error}")
            continue
        able.append(dtype)
        found = perplexity.diverge(reference, model, tokens)
        if not any(row.system == REFERENCE for row in report.rows):
            report.rows.append(Row.of(workload, REFERENCE, "perplexity", [found.reference], ""))
        report.rows += [
            Row.of(workload, dtype, "perplexity", [found.perplexity], ""),
            Row.of(workload, dtype, "KL from float32", [found.kl * 1e3], "millinats"),
            Row.of(workload, dtype, "same best token", [found.same_best * 100], "%"),
        ]
        report.ratios[f"perplexity_{dtype}"] = found.perplexity / found.reference
        if dtype in MOST:
            report.targets[f"perplexity_{dtype}"] = MOST[dtype]
    return able


async def served(
    report: Report, path: Path, system: System, url: str, given: Sequence[tasks.Task], quick: bool
) -> None:
    """Speed of one request, and the score of each task."""
    dtype = system.name.removeprefix("farthing ")
    words = Words(load_tokenizer(path), 1)
    async with Client(url, system.model) as client:
        await client.complete(words.ids(64), 8)
        rates = [(await decode(client, words, QUICK if quick else FULL))[0] for _ in range(1 if quick else 3)]
        report.rows.append(Row.of(rates[0].workload, dtype, "decode", [rate.value for rate in rates], "tok/s"))
        for task in given:
            await score(report, dtype, client, task)


async def score(report: Report, dtype: str, client: Client, task: tasks.Task) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(problem: tasks.Problem) -> tuple[str, int]:
        async with gate:
            return await client.write(problem.prompt, problem.max_tokens, problem.stop)

    began = time.perf_counter()
    answers = await asyncio.gather(*(ask(problem) for problem in task.problems))
    seconds = time.perf_counter() - began
    workload = f"{task.name}, {len(task.problems)} problems"
    rate = sum(count for _, count in answers) / seconds
    report.rows.append(Row.of(workload, dtype, f"throughput, {AT_ONCE} at once", [rate], "tok/s"))
    try:
        right = [task.correct(problem, text) for problem, (text, _) in zip(task.problems, answers, strict=True)]
    except sandbox.IsolationError as error:
        report.notes.append(f"{task.name}, {dtype}: {error}")
        return
    report.rows.append(Row.of(workload, dtype, "right", [100 * sum(right) / len(right)], "%"))
    say(f"{dtype}: {task.name} {sum(right)} of {len(right)} right")


def compare_scores(report: Report, given: Sequence[tasks.Task]) -> None:
    for task in given:
        scores = {r.system: r.value for r in report.rows if r.workload.startswith(task.name) and r.metric == "right"}
        if base := scores.pop(BASE, 0.0):
            report.ratios |= {f"{task.name.lower()}_{dtype}": score / base for dtype, score in scores.items()}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    options = arguments()
    path = pull(options.model)
    systems, missing = peers.farthing(options.model, path, options.dtype)
    names = [system.name.removeprefix("farthing ") for system in systems]
    given = tasks.load(options.data, 8 if options.quick and options.samples is None else options.samples)
    report = Report()
    able = prose(report, path, names, 256 if options.quick else 4096)
    for system in (system for system in systems if system.name.removeprefix("farthing ") in able):
        with start(system) as running:
            asyncio.run(served(report, path, system, running.url, given, options.quick))
            memory = running.peak_memory() / 2**20
        report.rows.append(Row.of("server", system.name.removeprefix("farthing "), "peak memory", [memory], "MiB"))
    compare_scores(report, given)
    report.rows.sort(key=lambda row: (row.workload, row.metric))
    compared = f"perplexity is over {REFERENCE}'s, where 1.01 is 1% more, scores are over {BASE}'s"
    report.notes.insert(0, f"model {options.model}, quality of number formats; {compared}")
    report.notes += [f"Not measured: {line}" for line in missing]
    if not given and options.samples != 0:
        report.notes.append(f"Not measured: GSM8K and HumanEval, whose files are not in {options.data}")
    report.emit(options.json, PACKAGES)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a name from the catalogue")
    parser.add_argument("--dtype", type=listed, default=DTYPES, help=f"of {', '.join(DTYPES)} (KV in int8 too)")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data", help="folder with the tasks' files")
    parser.add_argument("--samples", type=int, metavar="N", help="problems of each task; all by default, 0 none")
    parser.add_argument("--quick", action="store_true", help="256 tokens of prose, 8 problems")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there instead of printing them")
    return parser.parse_args()


if __name__ == "__main__":
    main()
