"""Paged attention against the textbook formula, one query at a time."""

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.attention import AttentionPlan
from tests.engine.flat import Paged, flat_batch

DIM = 8
POOL_BLOCKS = 64


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Work this small only waits for a second thread, for long where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def textbook(query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[H, D] over [context, kv heads, D]; each key head serves its neighbouring query heads."""
    shared = len(query) // keys.shape[1]
    out = []
    for head, vector in enumerate(query):
        scores = (keys[:, head // shared] @ vector * scale).double()
        weights = (scores if softcap is None else softcap * (scores / softcap).tanh()).softmax(0)
        out.append(weights @ values[:, head // shared].double())
    return torch.stack(out).float()


def check(
    lengths: list[tuple[int, int]],
    kv_heads: int,
    shared: int,
    window: int | None,
    scattered: bool,
    softcap: float | None = None,
) -> None:
    """Each (cached, new) pair is one sequence of the step; compare every row with the formula."""
    rng = random.Random(0)
    free = list(range(POOL_BLOCKS))
    if scattered:
        rng.shuffle(free)
    sequences = []
    for cached, new in lengths:
        count = -(-(cached + new) // 16)
        sequences.append((Paged([0] * (cached + new), free[:count], cached), new))
        free = free[count:]
    batch = flat_batch(sequences)
    pool = torch.randn(POOL_BLOCKS * 16, 2 * kv_heads, DIM)
    pool[[block * 16 + i for block in free for i in range(16)]] = torch.nan  # nothing may read what no one owns
    queries = torch.randn(len(batch.token_ids), kv_heads * shared, DIM)
    got = AttentionPlan(batch, torch.float32).attend(queries, pool, 0.3, window, softcap)
    row = 0
    for (cached, new), (sequence, _) in zip(lengths, sequences, strict=True):
        slots = [sequence.blocks[i // 16] * 16 + i % 16 for i in range(cached + new)]
        for position in range(cached, cached + new):
            seen = slots[max(0, position + 1 - window) if window else 0 : position + 1]
            keys, values = pool[seen, :kv_heads], pool[seen, kv_heads:]
            wanted = textbook(queries[row], keys, values, 0.3, softcap).flatten()
            torch.testing.assert_close(got[row], wanted, atol=1e-5, rtol=0)
            row += 1


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 4),
    window=st.sampled_from([None, 1, 7, 50]),
    scattered=st.booleans(),
    softcap=st.sampled_from([None, 0.5, 30.0]),
)
def test_any_mix_of_sequences(lengths, kv_heads, shared, window, scattered, softcap) -> None:
    check(lengths, kv_heads, shared, window, scattered, softcap)


@pytest.mark.parametrize("scattered", [True, False])
def test_decoding_sequences_of_very_different_lengths(scattered: bool) -> None:
    check([(0, 1), (15, 1), (16, 1), (300, 1), (310, 1), (40, 5), (100, 1)], 2, 3, None, scattered)
