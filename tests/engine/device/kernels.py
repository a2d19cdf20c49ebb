"""Each Triton kernel against float64 arithmetic, on a GPU or in Triton's interpreter.

Run in a process of its own: by test_triton.py in the interpreter, by `python -m benchmarks.gpu` on a GPU.
"""

import math
import random

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import sampling
from engine.backends.base import HeadNorms
from engine.backends.triton import TritonBackend
from engine.kernels import INTERPRETED
from engine.kernels.choose import choose
from engine.kernels.gate import gate
from engine.kernels.rms_norm import rms_norm
from engine.kernels.rotate_and_store import rotate_and_store
from tests.engine.flat import Paged, flat_batch

TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
torch.set_default_device(DEVICE)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Of a result, relative to its magnitude; the interpreter cuts the bits off that bfloat16 lacks."""
SEEDS = st.integers(0, 1 << 30)
settings.register_profile("interpreter", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("interpreter")  # a failure is small already, and the interpreter too slow to look for a smaller


def close(got: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    bound = ROUNDING[got.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(got.double(), wanted, atol=bound, rtol=bound)


@settings(max_examples=25)
@given(seed=SEEDS, dtype=TYPES, tokens=st.integers(1, 5), size=st.integers(1, 300), adding=st.booleans())
def test_norm_of_rows(seed: int, dtype: torch.dtype, tokens: int, size: int, adding: bool) -> None:
    torch.manual_seed(seed)
    x, delta = torch.randn(2, tokens, size).to(dtype) * 3
    weight = torch.randn(size)
    total = x.double() + delta.double() if adding else x.double()
    wanted = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    close(rms_norm(x, weight, 1e-5, delta if adding else None), wanted)
    close(x, total)


@settings(max_examples=20)
@given(seed=SEEDS, dtype=TYPES, tokens=st.integers(1, 4), size=st.integers(1, 1500), gelu=st.booleans())
def test_gate(seed: int, dtype: torch.dtype, tokens: int, size: int, gelu: bool) -> None:
    torch.manual_seed(seed)
    gate_up = (torch.randn(tokens, 2 * size) * 4).to(dtype)
    first, second = gate_up.double().split(size, dim=-1)
    wanted = (F.gelu(first, approximate="tanh") if gelu else F.silu(first)) * second
    close(gate(gate_up, gelu=gelu), wanted)


@settings(max_examples=25)
@given(
    seed=SEEDS,
    dtype=TYPES,
    stored=TYPES,
    tokens=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    half=st.integers(1, 24),
    normed=st.booleans(),
)
def test_turning_and_storing(seed, dtype, stored, tokens, kv_heads, shared, half, normed) -> None:
    torch.manual_seed(seed)
    heads, size = kv_heads * shared, 2 * half
    mixed = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
    rotations = torch.polar(torch.full((tokens, 1, half), 1.25), torch.randn(tokens, 1, half) * 9)
    slots = torch.randperm(5 * 16)[:tokens]
    turned = mixed.double()
    norms = HeadNorms(torch.randn(size), torch.randn(size), 1e-6) if normed else None
    for weight, part in zip(norms[:2] if norms else (), turned.split((heads, kv_heads, kv_heads), dim=1), strict=False):
        part.mul_(weight / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    pairs = torch.view_as_complex(turned[:, : heads + kv_heads].unflatten(-1, (half, 2)).clone())
    turned[:, : heads + kv_heads] = torch.view_as_real(pairs * rotations.to(torch.complex128)).flatten(-2)
    pool = torch.full((5, 2 * kv_heads, 16, size), 7.0, dtype=stored)
    rotate_and_store(mixed, heads, norms, rotations, pool, slots)
    close(mixed[:, :heads], turned[:, :heads])
    for row, slot in enumerate(slots.tolist()):
        close(pool[slot // 16, :, slot % 16], turned[row, heads:])
        pool[slot // 16, :, slot % 16] = 7
    assert (pool == 7).all()


def textbook(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """[n, H, D] queries, the last ones of a context of [context, kv heads, D]; all float64."""
    rows, context = len(query), len(keys)
    keys, values = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(context - rows, context)[:, None] - torch.arange(context)
    hidden = (distance < 0) | (distance >= (window or math.inf))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


class Splitting(TritonBackend):
    """Splits the keys of every tile, whatever the device."""

    splits = 1

    def _splits(self, *_: object) -> int:
        return self.splits


@settings(max_examples=30)
@given(
    seed=SEEDS,
    lengths=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 1, 2, 5, 17, 40])), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 5),
    size=st.sampled_from([8, 16, 24, 40]),
    window=st.sampled_from([None, 1, 7, 50]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    dtype=TYPES,
    splits=st.sampled_from([1, 1, 4, 16]),
)
def test_attention_of_any_mix_of_sequences(
    seed, lengths, kv_heads, shared, size, window, softcap, dtype, splits
) -> None:
    """Each (cached, new) pair is one sequence of the step, its blocks scattered."""
    torch.manual_seed(seed)
    blocks = random.Random(seed).sample(range(40), 40)
    sequences = []
    for cached, new in lengths:
        count = -(-(cached + new) // 16)
        sequences.append((Paged([0] * (cached + new), blocks[:count], cached), new))
        blocks = blocks[count:]
    batch = flat_batch(sequences)
    backend = Splitting(dtype, DEVICE)
    backend.splits = splits
    pool = backend.new_kv(40 * 16, kv_heads, size)
    pool.copy_(torch.randn(pool.shape))
    by_slot = pool.transpose(1, 2).flatten(0, 1)  # a copy
    pool[blocks] = torch.nan  # nothing may read what no one owns
    heads = kv_heads * shared
    mixed = torch.randn(len(batch.token_ids), heads + 2 * kv_heads, size).to(dtype)
    got = backend.attend(mixed[:, :heads], pool, backend.plan(batch), 0.3, window, softcap)
    for index, (sequence, _) in enumerate(sequences):
        own = by_slot[[sequence.blocks[i // 16] * 16 + i % 16 for i in range(batch.context_lens[index])]].double()
        rows = slice(*batch.query_starts[index : index + 2])
        wanted = textbook(mixed[rows, :heads].double(), own[:, :kv_heads], own[:, kv_heads:], 0.3, window, softcap)
        close(got[rows], wanted.flatten(1), 3 * ROUNDING[dtype])


def textbook_choice(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """In float64, with equal logits in the order of their ids."""
    best = max(logits)
    if temperature == 0:
        return logits.index(best)
    weights = [math.exp((logit - best) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -logits[token])[:top_k]
    goal, before, kept = top_p * sum(weights[token] for token in order), 0.0, []
    for token in order:
        if top_p < 1 and before >= goal and kept:
            break
        kept.append(token)
        before += weights[token]
    kept = sorted(token for token in kept if weights[token] >= min_p)
    goal, before = uniform * sum(weights[token] for token in kept), 0.0
    for token in kept:
        before += weights[token]
        if before > goal:
            return token
    raise AssertionError("the sum of all is above the goal")


@settings(max_examples=15)
@given(
    seed=SEEDS,
    size=st.integers(1, 3000),
    spread=st.sampled_from([0.1, 3.0, 40.0]),
    temperature=st.sampled_from([0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 40, 2000]),
    top_p=st.sampled_from([1.0, 0.0, 0.3, 0.95, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    ties=st.booleans(),
)
def test_choice(seed, size, spread, temperature, top_k, top_p, min_p, ties) -> None:
    """A greedy row, one with all filters, one without min-p and with half of the tokens forbidden."""
    torch.manual_seed(seed)
    logits = torch.randn(3, size) * spread
    if ties:
        logits = logits.round()
    logits[2, torch.rand(size) < 0.5] = -math.inf
    logits[2, 0] = 0.25
    limit = min(top_k or size, size)
    arguments = (
        torch.tensor([0.0, temperature, temperature]),
        torch.tensor([limit] * 3),
        torch.tensor([top_p] * 3),
        torch.tensor([min_p, min_p, 0.0]),
        torch.rand(3),
    )
    got = choose(logits, *arguments).tolist()
    rows = zip(logits.tolist(), *(argument.tolist() for argument in arguments), strict=True)
    assert got == [textbook_choice(*row) for row in rows]
    if not ties:  # of equals, torch's takes any
        assert got == sampling.choose(logits.clone(), *arguments).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_gives_the_first(temperature: float) -> None:
    one = torch.ones(1)
    logits = torch.full((1, 70), -math.inf)
    got = choose(logits, one * temperature, torch.tensor([70]), one, one * 0, one / 2)
    assert got.tolist() == [0]
