"""Writes the results of benchmarks as a page: `python -m benchmarks.results FILE.json … > benchmarks/RESULTS.md`.

The files are what the benchmarks' --json writes; each becomes a section with one table of medians, a system a column,
and one of ratios beside what they should be.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import number

INTRODUCTION = """# Results

Each section is one run of `python -m benchmarks.engine`, `benchmarks.quality`, `benchmarks.gateway`,
`benchmarks.billing`, `benchmarks.migrations` or `benchmarks.alerts` on one machine, as `python -m benchmarks.results`
writes it. Figures are medians with the lowest and the highest in brackets. A ratio over 1 means that Farthing is better
than the best peer, unless its target says that less is better. Absolute figures drift with the machine and its
neighbours; what one run has side by side can be compared.
"""


def page(runs: Sequence[dict[str, Any]]) -> str:
    return "\n".join([INTRODUCTION, *(section(run) for run in runs)])


def section(run: dict[str, Any]) -> str:
    title, *notes = run["notes"] or ["a run"]
    where = run["machine"]
    machine = f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, {' '.join(where['flags'])}"
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    parts = [f"## {title[:1].upper()}{title[1:]}", "", f"{machine}. {versions}.", "", *measurements(run["rows"])]
    if run["ratios"]:
        parts += ["", *ratios(run)]
    if notes:
        parts += ["", *(f"- {note}" for note in notes)]
    return "\n".join([*parts, ""])


def measurements(rows: Sequence[dict[str, Any]]) -> list[str]:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((row["workload"], row["metric"], row["unit"]), {})
        line[row["system"]] = figure(row)
    table = [_line("workload", "figure", *systems), _line(*["---"] * 2, *["---:"] * len(systems))]
    for (workload, metric, unit), cells in lines.items():
        named = f"{metric}, {unit}" if unit else metric
        table.append(_line(workload, named, *(cells.get(system, "") for system in systems)))
    return table


def figure(row: dict[str, Any]) -> str:
    median = number(row["value"])
    return median if row["runs"] == 1 else f"{median} ({number(row['low'])}–{number(row['high'])})"


def ratios(run: dict[str, Any]) -> list[str]:
    table = [_line("ratio", "measured", "target", "of"), _line("---", "---:", "---:", "---")]
    return table + [
        _line(name, number(value), run["targets"].get(name, ""), run["basis"].get(name, ""))
        for name, value in run["ratios"].items()
    ]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(files: Sequence[str]) -> int:
    if not files or files[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    sys.stdout.write(page([json.loads(Path(file).read_text(encoding="utf-8")) for file in files]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
