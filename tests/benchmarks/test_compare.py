"""Ratios of the best of ours to the best of theirs."""

import pytest

from benchmarks.compare import compare
from benchmarks.report import Report
from benchmarks.servers import System

SYSTEMS = [
    System("farthing int8", "farthing", (), "m", weight_bits=8),
    System("farthing int4", "farthing", (), "m", weight_bits=4),
    System("llama.cpp q8_0", "llama.cpp", (), "m", weight_bits=8),
    System("vllm bf16", "vllm", (), "m", weight_bits=16),
]


@pytest.fixture
def report() -> Report:
    values = {
        ("farthing int8", "decode_b1"): [90.0, 100.0, 500.0],
        ("farthing int4", "decode_b1"): [120.0],
        ("llama.cpp q8_0", "decode_b1"): [80.0],
        ("vllm bf16", "decode_b1"): [20.0],
        ("farthing int8", "rag"): [10.0],
        ("llama.cpp q8_0", "rag"): [40.0],
        ("vllm bf16", "rag"): [25.0],
        ("farthing int8", "memory"): [500.0],
        ("farthing int4", "memory"): [400.0],
        ("llama.cpp q8_0", "memory"): [1000.0],
        ("farthing int8", "ready"): [2.0],
    }
    report = Report()
    compare(report, SYSTEMS, values)
    return report


def test_over_one_is_better_for_rates_and_for_times(report: Report) -> None:
    assert report.ratios["decode_b1"] == 120 / 80 and report.ratios["rag"] == 25 / 10
    assert report.basis["decode_b1"] == "farthing int4 120.0 / llama.cpp q8_0 80.0"
    assert report.basis["rag"] == "vllm bf16 25.0 / farthing int8 10.0"
    assert (report.targets["decode_b1"], report.targets["rag"]) == ("1.1", "2")


def test_each_system_of_ours_has_its_own_ratio_of_medians(report: Report) -> None:
    assert report.ratios["decode_b1_int8"] == 100 / 80 and report.ratios["decode_b1_int4"] == 120 / 80
    assert "rag_int4" not in report.ratios


def test_memory_is_compared_at_the_same_bits_only(report: Report) -> None:
    assert report.ratios["memory_int8"] == 0.5 and report.targets["memory_int8"] == "<1"
    assert "memory_int4" not in report.ratios


def test_what_was_not_measured_has_no_ratio(report: Report) -> None:
    assert "template" not in report.ratios and report.ratios["ready"] == 2.0
