"""The commands themselves, on the real small model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import ROOT


def run(tmp_path: Path, *arguments: str) -> dict:
    command = [sys.executable, "-m", *arguments, "--quick", "--json", str(tmp_path / "r.json")]
    env = os.environ | {"PEERS": str(tmp_path / "peers")}
    subprocess.run(command, cwd=ROOT, env=env, timeout=200, check=True)
    return json.loads((tmp_path / "r.json").read_text())


@pytest.mark.model
def test_a_peer_that_is_not_installed_is_named(tmp_path: Path) -> None:
    found = run(tmp_path, "benchmarks.engine", "--peers", "llama.cpp,vllm", "--dtype", "int3")
    assert not found["rows"] and not found["ratios"]
    notes = "\n".join(found["notes"])
    assert "Not measured: llama.cpp: not installed (python -m benchmarks.peers install llama.cpp)" in notes
    assert "Not measured: vllm: not installed" in notes and "the engine has no --dtype int3" in notes


@pytest.mark.model
def test_the_engine_is_measured_as_a_server(tmp_path: Path) -> None:
    found = run(tmp_path, "benchmarks.engine", "--peers", "none", "--dtype", "int8", "--only", "decode,ttft")
    rows = {(row["system"], row["metric"]): row for row in found["rows"]}
    assert rows["farthing int8", "decode"]["value"] > 0
    assert rows["farthing int8", "peak memory"]["value"] > 100
    assert found["ratios"]["ready"] > 0
    assert found["ratios"]["ttft_1024_warm_ms_over_one_token"] < rows["farthing int8", "first token, cold"]["value"]


@pytest.mark.model
def test_quality_beside_speed_and_memory(tmp_path: Path) -> None:
    if not (ROOT.parent / "shared/data").is_dir():
        pytest.skip("the data sets are not beside the repository")
    found = run(tmp_path, "benchmarks.quality", "--dtype", "int8", "--samples", "2")
    rows = {(row["workload"], row["metric"]): row["value"] for row in found["rows"] if row["system"] == "int8"}
    assert 1 <= found["ratios"]["perplexity_int8"] < 1.2
    assert rows["256 tokens of prose", "KL from float32"] > 0
    assert 0 <= rows["GSM8K, 2 problems", "right"] <= 100
    refused = any("HumanEval" in note for note in found["notes"])
    assert refused or 0 <= rows["HumanEval, 2 problems", "right"] <= 100
    assert rows["server", "peak memory"] > 100
