"""The compiled kernels against the torch code they replace, and starting without a compiler."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import native
from engine.backends.cpu import CpuBackend
from engine.backends.linear import Int8Linear, quantise
from engine.native import Kernels


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    found = native.kernels()
    assert found is not None, "tests need a C++ compiler"
    return found


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 5), size=st.integers(1, 700), scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e6]))
def test_rows_are_quantised_as_torch_does(compiled: Kernels, rows: int, size: int, scale: float) -> None:
    x = torch.randn(rows, size) * scale
    x[0, 0] = -x[0].abs().max()
    got, largest = compiled.quantise(x)
    wanted, wanted_largest = quantise(x)
    assert torch.equal(largest, wanted_largest)
    some = wanted_largest[:, 0] > 0  # a row of zeros may become anything: it is multiplied by 0
    # The two divide in a different order, so a value half way between two steps may go either way.
    if some.any():
        difference = (got[some].int() - wanted[some].int()).abs()
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 0.01


def test_rms_norm_is_the_formula(compiled: Kernels) -> None:
    x, weight = torch.randn(3, 4, 577)[:, 1:3], torch.rand(577)
    wanted = F.rms_norm(x.double(), (577,), weight.double(), 1e-5)
    torch.testing.assert_close(compiled.rms_norm(x, weight, 1e-5).double(), wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(CpuBackend("int8").rms_norm(x, weight, 1e-5).double(), wanted, atol=1e-6, rtol=1e-6)


def test_an_int8_product_is_the_same_with_and_without(compiled: Kernels) -> None:
    weight, bias, x = torch.randn(64, 96), torch.randn(64), torch.randn(7, 96)
    x[3] = 0
    with_torch, with_native = Int8Linear(weight, bias)(x), Int8Linear(weight, bias, compiled)(x)
    torch.testing.assert_close(with_native, with_torch, atol=0.05, rtol=0)
    assert torch.equal(with_native[3], bias)
    assert torch.equal(with_torch[3], bias)


@pytest.mark.parametrize("dim", [64, 80, 1024])
def test_long_contexts_share_the_threads(compiled: Kernels, dim: int) -> None:
    sequences, blocks = 3, 64
    pool = torch.randn(sequences * blocks * 16, 2, dim).bfloat16()
    table = torch.randperm(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    contexts = torch.tensor([1024, 999, 1], dtype=torch.int32)
    mixed = torch.randn(sequences, 11, dim)
    queries = mixed[:, :9]  # as the models pass them: a slice of q, k and v together
    got = compiled.decode_attention(queries, pool, table, contexts, 0.125, None)
    for s in range(sequences):
        slots = (table[s].long()[:, None] * 16 + torch.arange(16)).flatten()[: contexts[s]]
        keys, values = pool[slots, 0].double(), pool[slots, 1].double()
        wanted = (queries[s].double() @ keys.T * 0.125).softmax(-1) @ values
        torch.testing.assert_close(got[s].double(), wanted.flatten(), atol=2e-5, rtol=1e-5)


def test_without_a_compiler_there_are_none_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert native.kernels.__wrapped__() is None
    assert "/nowhere/c++" in caplog.text
    monkeypatch.setenv("CXX", "false")
    assert native.kernels.__wrapped__() is None
    assert list(tmp_path.rglob("*.so")) == []
