"""What every benchmark prints: the machine, the versions, rows of measurements and the ratios between them."""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


@dataclass(frozen=True)
class Row:
    """One figure: the median of `runs` measurements, with the lowest and the highest beside it."""

    workload: str
    system: str
    metric: str
    value: float
    unit: str
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, workload: str, system: str, metric: str, values: Sequence[float], unit: str) -> "Row":
        return cls(workload, system, metric, statistics.median(values), unit, min(values), max(values), len(values))


@dataclass
class Report:
    """Rows and ratios of one run. `targets` names the least (or, with a leading "<", the most) a ratio should be,
    `basis` the two figures it is of, and `versions` what was measured that is not a package of this environment."""

    rows: list[Row] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    basis: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def value(self, workload: str, system: str, metric: str) -> float:
        return next(r.value for r in self.rows if (r.workload, r.system, r.metric) == (workload, system, metric))

    def emit(self, path: Path | None, packages: Sequence[str]) -> None:
        """Write JSON to `path`, or print tables when there is none. `packages`: whose versions to name."""
        if path is not None:
            self.write_json(path, packages)
        else:
            self.print(packages)

    def write_json(self, path: Path, packages: Sequence[str]) -> None:
        body: dict[str, Any] = {
            "machine": machine(),
            "versions": versions(packages) | self.versions,
            "rows": [asdict(row) for row in self.rows],
            "ratios": self.ratios,
            "targets": self.targets,
            "basis": self.basis,
            "notes": self.notes,
        }
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    def print(self, packages: Sequence[str]) -> None:
        console = Console(width=110, highlight=False)
        where = machine()
        console.print(f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, {', '.join(where['flags'])}")
        console.print(", ".join(f"{name} {version}" for name, version in (versions(packages) | self.versions).items()))
        table = Table(title=None)
        for heading in ("workload", "system", "metric"):
            table.add_column(heading)
        for heading in ("median", "low", "high"):
            table.add_column(heading, justify="right")
        table.add_column("unit")
        for row in self.rows:
            figures = map(number, (row.value, row.low, row.high))
            table.add_row(row.workload, row.system, row.metric, *figures, row.unit)
        console.print(table)
        table = Table(title=None)
        table.add_column("ratio")
        table.add_column("measured", justify="right")
        table.add_column("target", justify="right")
        table.add_column("of")
        for name, ratio in self.ratios.items():
            table.add_row(name, f"{ratio:.2f}", self.targets.get(name, ""), self.basis.get(name, ""))
        console.print(table)
        for note in self.notes:
            console.print(note)


def number(value: float) -> str:
    """Four digits, or all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def machine() -> dict[str, Any]:
    """CPU model, core count, memory and the instruction sets that decide matrix speed."""
    cpu, flags = platform.processor(), ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                cpu = value.strip()
            elif key.strip() == "flags":
                flags = value
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "flags": [flag for flag in CPU_FLAGS if flag in flags.split()],
        "system": platform.platform(),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions of `packages`, Python's and the commit measured (with a + when the tree is changed)."""
    found = {"python": platform.python_version()}
    found |= {name: importlib.metadata.version(name) for name in packages}
    found["commit"] = _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else "")
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
