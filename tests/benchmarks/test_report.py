"""What every benchmark writes and prints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import ROOT, Report, Row

COMMANDS = [
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if "report.emit(" in path.read_text() and path.stem != "gpu"  # which is quick as it is
]


@pytest.fixture
def report() -> Report:
    rows = [Row.of("1 in, 1 out", "farthing", "decode", [3.0, 1.0, 2.5], "tok/s")]
    return Report(rows, {"decode": 2.5}, {"decode": "2"}, ["a note"])


def test_the_json_has_the_shape_that_readers_expect(report: Report, tmp_path: Path) -> None:
    report.write_json(tmp_path / "r.json", ("torch",))
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["machine"]["cores"] > 0 and written["machine"]["cpu"]
    assert {"torch", "python", "commit"} <= written["versions"].keys()
    [row] = written["rows"]
    assert {name: row[name] for name in ("workload", "system", "metric", "value", "unit")} == {
        "workload": "1 in, 1 out", "system": "farthing", "metric": "decode", "value": 2.5, "unit": "tok/s",
    }  # fmt: skip
    assert (row["low"], row["high"], row["runs"]) == (1.0, 3.0, 3)
    assert written["ratios"] == {"decode": 2.5}


def test_a_person_gets_tables(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.print(("torch",))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any({"farthing", "decode", "2.5", "1", "3", "tok/s"} <= set(line) for line in lines)
    assert any({"decode", "2.50", "2"} <= set(line) for line in lines)
    assert ["a", "note"] in lines


@pytest.mark.parametrize("name", COMMANDS)
def test_every_benchmark_takes_quick_and_json(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True).stdout
    assert "--quick" in shown and "--json FILE" in shown


def test_there_is_a_benchmark() -> None:
    assert "engine" in COMMANDS
