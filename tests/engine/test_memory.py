"""Sizes as people write them, and blocks that fit in them."""

import pytest

from engine.memory import available_memory, blocks_that_fit, parse_size, resident_memory, show_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1GiB", 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("500MB", 500_000_000),
        ("2g", 2 * 10**9),
        ("1KiB", 1024),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 parsec", "1e9", "NaN", "1GiB2"])
def test_what_is_not_a_size_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_sizes_are_shown_to_people() -> None:
    assert [show_size(size) for size in (10, 1536, 64 << 20, 5 << 40)] == ["10 B", "1.5 KiB", "64.0 MiB", "5120.0 GiB"]


def test_pools_of_all_models_have_the_same_length_and_fit() -> None:
    assert blocks_that_fit([100, 300], 4399) == 10
    with pytest.raises(ValueError, match="at least 400 B"):
        blocks_that_fit([100, 300], 399)


def test_the_default_is_a_share_of_what_is_available() -> None:
    blocks = blocks_that_fit([1 << 20], None)
    assert 0 < blocks <= min(available_memory() // 4 + (1 << 28), 4 << 30) >> 20
    assert 0 < resident_memory() < 1 << 36
