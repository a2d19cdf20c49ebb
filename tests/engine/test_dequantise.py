"""Quantised blocks become the numbers that the gguf package makes of them, bit for bit."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from engine.loader.dequantise import CHUNK_ELEMENTS, UNPACK, block_sizes, dequantised

# Where the half-precision scales of each type lie in a block.
SCALES = {
    Kind.Q4_0: [0],
    Kind.Q4_1: [0, 2],
    Kind.Q5_0: [0],
    Kind.Q5_1: [0, 2],
    Kind.Q8_0: [0],
    Kind.Q4_K: [0, 2],
    Kind.Q5_K: [0, 2],
    Kind.Q6_K: [208],
    Kind.Q2_K: [80, 82],
    Kind.Q3_K: [108],
    Kind.IQ4_NL: [0],
}


def random_blocks(kind: Kind, count: int) -> np.ndarray:
    """Any bits at all, but for the scales, which are numbers: NaN has many forms."""
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), np.uint8)
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = rng.normal(0, 1, (count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", SCALES, ids=[kind.name for kind in SCALES])
def test_blocks_of_any_bits(kind: Kind) -> None:
    elements, size = block_sizes(kind)
    for rows, columns in ((1, 1), (1, 7), (7, 3), (2, CHUNK_ELEMENTS // elements // 2 + 3)):
        stored = random_blocks(kind, rows * columns).reshape(rows, columns * size)
        got = dequantised(stored, kind, (rows, columns * elements)).numpy()
        assert np.array_equal(got.view(np.uint32), dequantize(stored, kind).view(np.uint32)), (rows, columns)


def test_every_fast_type_is_tested_and_others_go_through_the_package() -> None:
    assert UNPACK.keys() < SCALES.keys()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_plain_numbers(dtype: type) -> None:
    kind = {np.float32: Kind.F32, np.float16: Kind.F16, np.float64: Kind.F64}[dtype]
    values = np.random.default_rng(1).normal(size=(3, 5)).astype(dtype)
    assert np.array_equal(dequantised(values.view(np.uint8), kind, (3, 5)).numpy(), values.astype(np.float32))


def test_bfloat16() -> None:
    values = torch.randn(3, 5).bfloat16()
    assert torch.equal(dequantised(values.view(torch.uint8).numpy(), Kind.BF16, (3, 5)), values.float())


def test_types_that_cannot_be_read() -> None:
    assert [block_sizes(kind) for kind in (Kind.I32, Kind.Q8_K, 9_999)] == [None] * 3
