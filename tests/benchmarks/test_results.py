"""The page of results."""

import json
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.report import Report, Row


def test_a_run_becomes_a_table_with_a_column_a_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(
        [
            Row.of("1 request", "farthing int8", "decode", [100.0, 120.0, 110.0], "tok/s"),
            Row.of("1 request", "llama.cpp q8_0", "decode", [80.0], "tok/s"),
            Row.of("prose", "farthing int8", "perplexity", [14.042], ""),
        ],
        {"decode_b1": 1.375},
        {"decode_b1": "1.1"},
        ["model m, 3 repetitions", "Not measured: vllm: not installed"],
        {"decode_b1": "farthing int8 110.0 / llama.cpp q8_0 80.0"},
    )
    file = tmp_path / "r.json"
    report.write_json(file, ())
    assert results.main([str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "## Model m, 3 repetitions" in lines and "- Not measured: vllm: not installed" in lines
    assert "| workload | figure | farthing int8 | llama.cpp q8_0 |" in lines
    assert "| 1 request | decode, tok/s | 110 (100–120) | 80 |" in lines
    assert "| prose | perplexity | 14.04 |  |" in lines
    assert "| decode_b1 | 1.375 | 1.1 | farthing int8 110.0 / llama.cpp q8_0 80.0 |" in lines
    assert json.loads(file.read_text())["basis"]


def test_without_files_it_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert results.main([]) == 2
    assert "benchmarks.results FILE.json" in capsys.readouterr().err
