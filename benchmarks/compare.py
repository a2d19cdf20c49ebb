"""Ratios between the best of our systems and the best of the peers, one for each figure they are compared by."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.report import Report
from benchmarks.servers import System

HIGH = ("decode_b1", "throughput_c8", "throughput_c32")
"""Figures of which more is better; of the others less is."""
TARGETS = {
    "decode_b1": "1.1",
    "throughput_c8": "2",
    "throughput_c32": "2",
    "ttft_1024_cold": "2",
    "multiturn": "2",
    "rag": "2",
    "template": "2",
}
OWN_TARGETS = {"ttft_1024_warm_ms_over_one_token": "<30", "ready": "<10"}
"""Figures with a target of their own, whatever the peers do: milliseconds and seconds."""

Values = Mapping[tuple[str, str], Sequence[float]]
"""(system, key) -> values"""


def compare(report: Report, systems: Sequence[System], values: Values) -> None:
    """Fill in `ratios`, `targets` and `basis`. A ratio over 1 is better than the best peer, whatever the figure.

    With several systems of ours the ratio is the best one's, and each one's own stands beside it as KEY_DTYPE.
    """
    ours = [system for system in systems if system.family == "farthing"]
    theirs = [system for system in systems if system.family != "farthing"]
    for key, target in TARGETS.items():
        mine, best = _best(key, ours, values), _best(key, theirs, values)
        if mine is None or best is None:
            continue
        _add(report, key, mine, best, target)
        for system in ours if len(ours) > 1 else ():
            if own := _best(key, [system], values):
                _add(report, f"{key}_{system.name.partition(' ')[2]}", own, best, target)
    for key, target in OWN_TARGETS.items():
        if mine := _best(key, ours, values):
            report.ratios[key], report.targets[key], report.basis[key] = mine[1], target, mine[0]
    _memory(report, ours, theirs, values)


def _memory(report: Report, ours: Sequence[System], theirs: Sequence[System], values: Values) -> None:
    """Peak memory over the least that llama.cpp takes at the same bits a weight."""
    for system in ours:
        same = [one for one in theirs if one.family == "llama.cpp" and one.weight_bits == system.weight_bits]
        mine, best = _best("memory", [system], values), _best("memory", same, values)
        if mine and best:
            name = f"memory_{system.name.partition(' ')[2]}"
            report.ratios[name], report.targets[name] = mine[1] / best[1], "<1"
            report.basis[name] = _over(mine, best)


def _best(key: str, systems: Sequence[System], values: Values) -> tuple[str, float] | None:
    found = [(s.name, statistics.median(values[s.name, key])) for s in systems if (s.name, key) in values]
    if not found:
        return None
    return (max if key in HIGH else min)(found, key=lambda pair: pair[1])


def _add(report: Report, name: str, mine: tuple[str, float], best: tuple[str, float], target: str) -> None:
    high = name.startswith(HIGH)
    report.ratios[name] = mine[1] / best[1] if high else best[1] / mine[1]
    report.targets[name] = target
    report.basis[name] = _over(mine, best) if high else _over(best, mine)


def _over(upper: tuple[str, float], lower: tuple[str, float]) -> str:
    return f"{upper[0]} {upper[1]:,.1f} / {lower[0]} {lower[1]:,.1f}"
