"""The compiled decoder's threads."""

import subprocess
from pathlib import Path

import pytest

from engine import native
from engine.native.compile import compiler


@pytest.mark.skipif(not native.able(), reason="this CPU has no AVX512-VNNI")
def test_a_pool_that_ends_right_after_its_last_phase_does_not_hang(tmp_path: Path) -> None:
    found = compiler()
    assert found is not None, "tests need a C++ compiler"
    program = tmp_path / "pool_ends"
    source = Path(__file__).with_name("pool_ends.cpp")
    subprocess.run([*found.split(), "-std=c++20", "-O1", "-pthread", source, "-o", program], check=True)
    subprocess.run([program], check=True, timeout=60)
