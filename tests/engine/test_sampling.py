"""Sampling: the drawn distribution is the asked one, rows don't see each other, and bad parameters are named."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling import CANDIDATES, one_thread, sample, uniform
from engine.sampling_params import ParameterError, SamplingParams


def expected(logits: Tensor, params: SamplingParams) -> Tensor:
    """[V] float64 probabilities, by the filters' definitions, one token at a time."""
    probabilities = (logits.double() / params.temperature).softmax(-1).tolist()
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(probabilities[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= params.top_p * total:
            break
        kept.append(token)
        mass += probabilities[token]
    kept = [token for token in kept if probabilities[token] >= params.min_p * probabilities[order[0]]]
    result = torch.zeros(len(probabilities), dtype=torch.float64)
    result[kept] = torch.tensor([probabilities[token] for token in kept], dtype=torch.float64)
    return result / result.sum()


def draw(logits: Tensor, params: SamplingParams, count: int, first_seed: int = 0) -> list[int]:
    """`count` draws from one row of logits, each with its own seed."""
    rows = logits.unsqueeze(0).expand(count, -1)
    with one_thread():
        return sample(rows, [params] * count, list(range(first_seed, first_seed + count)), [0] * count)


def chi_square(drawn: list[int], probabilities: Tensor) -> float:
    """Standardised statistic: about N(0, 1) when the draws follow `probabilities`. Rare tokens share one cell."""
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0, "a token that a filter excludes was drawn"
    wanted = probabilities * len(drawn)
    common = wanted >= 8
    cells = [(counts[common], wanted[common])]
    if (~common & (wanted > 0)).any():
        cells.append((counts[~common].sum().reshape(1), wanted[~common].sum().reshape(1)))
    observed, want = (torch.cat(part) for part in zip(*cells, strict=True))
    if len(want) == 1:
        return 0.0
    # Wilson and Hilferty's cube-root transform of a chi-square variable with `degrees` degrees of freedom
    degrees = len(want) - 1
    statistic = float(((observed - want) ** 2 / want).sum())
    return (math.cbrt(statistic / degrees) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.7, min_p=0.05),
    SamplingParams(top_p=0.999),
    SamplingParams(temperature=2.0, min_p=0.001),
    SamplingParams(temperature=2.0, top_k=1500, top_p=0.9),
]


@pytest.mark.parametrize("params", CASES, ids=repr)
@pytest.mark.parametrize(("vocabulary", "count"), [(50, 6000), (2000, 2000)])
def test_the_drawn_distribution_is_the_asked_one(params: SamplingParams, vocabulary: int, count: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(5)) * 2
    score = chi_square(draw(logits, params, count), expected(logits, params))
    assert abs(score) < 4


@pytest.mark.parametrize(
    ("vocabulary", "params"),
    [
        (49_152, SamplingParams()),
        (50_001, SamplingParams()),
        (49_152, SamplingParams(top_p=0.95)),
        (49_152, SamplingParams(top_k=300, min_p=1e-4)),
    ],
)
def test_with_a_real_vocabulary_the_mean_surprise_is_the_entropy(vocabulary: int, params: SamplingParams) -> None:
    ranks = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(2)) + 1
    logits = -1.6 * ranks.log()  # as Zipf's law has it
    probabilities = expected(logits, params)
    surprise = -probabilities.log()
    drawn = surprise[torch.tensor(draw(logits, params, 300))]
    entropy = (probabilities * surprise)[probabilities > 0].sum()
    assert abs(drawn.mean() - entropy) < 4 * drawn.std() / 300**0.5


def test_the_chi_square_notices_a_wrong_distribution() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(5)) * 2
    assert chi_square(draw(logits, SamplingParams(temperature=1.2), 6000), expected(logits, SamplingParams())) > 4


def test_a_filter_that_keeps_more_than_the_candidates_sees_the_whole_vocabulary() -> None:
    size = 2 * CANDIDATES[-1]
    drawn = draw(torch.zeros(size), SamplingParams(top_p=0.75), 200)
    assert min(drawn) < size // 8 and size // 2 < max(drawn) <= 3 * size // 4


filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, -1, 1, 5, 2000]),
    top_p=st.sampled_from([1.0, 0.9, 0.2, 1e-30]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_row_does_not_depend_on_its_neighbours_or_its_place(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    params = [data.draw(filters) for _ in range(count)]
    seeds = [data.draw(st.integers(-(2**63), 2**64 - 1)) for _ in range(count)]
    positions = [data.draw(st.integers(0, 100_000)) for _ in range(count)]
    # rounded, so that ties are common
    logits = (
        torch.randn(count, 2500, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) * 4
    ).round()
    together = sample(logits, params, seeds, positions)
    alone = [
        sample(logits[i : i + 1], params[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0] for i in range(count)
    ]
    assert together == alone
    for row, token in enumerate(together):
        if params[row].temperature > 0:
            assert expected(logits[row], SamplingParams(temperature=params[row].temperature))[token] > 0


def test_temperature_zero_takes_the_best_token_and_ignores_the_seed() -> None:
    logits = torch.randn(4, 300)
    assert sample(logits, [SamplingParams(temperature=0)] * 4, [1, 2, 3, 4], [0] * 4) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1e-300), SamplingParams(top_p=1e-300), SamplingParams(min_p=1)]
)
def test_extreme_but_allowed_values_take_the_best_token(params: SamplingParams) -> None:
    params.validate()
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 100
    assert set(draw(logits, params, 50)) == {int(logits.argmax())}


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((100,), -math.inf)
    logits[[7, 93]] = 0.0
    assert set(draw(logits, SamplingParams(), 200)) == {7, 93}
    assert set(draw(logits, SamplingParams(top_p=0.99), 200)) == {7, 93}


def test_uniform_covers_the_interval_evenly_for_neighbouring_seeds_and_positions() -> None:
    for numbers in ([uniform(seed, 0) for seed in range(4000)], [uniform(1, position) for position in range(4000)]):
        assert all(0 <= number < 1 for number in numbers)
        cells = torch.histc(torch.tensor(numbers), bins=20, min=0, max=1)
        assert ((cells - 200) ** 2 / 200).sum() < 50
    assert len({uniform(seed, position) for seed in range(-50, 50) for position in range(50)}) == 5000


@pytest.mark.parametrize(
    ("param", "values", "hint"),
    [
        ("temperature", [-0.1, 2.01, math.nan, math.inf, -math.inf, True, "1"], "from 0 to 2"),
        ("top_p", [0, -0.5, 1.0001, math.nan, math.inf], "above 0 and at most 1"),
        ("min_p", [-0.01, 1.5, math.nan], "from 0 to 1"),
        ("top_k", [-2, 1.5, True], "from 1 up, or 0 or -1 for all"),
        ("seed", [2**64, -(2**63) - 1, 1.0, True], "at most 64 bits"),
        ("max_tokens", [-1, 1.5], "at least 1"),
        ("stop", [("",), ("a" * 1025,), ("a", 3), ("a",) * 17], "stop"),
    ],
)
def test_a_bad_parameter_is_named_with_what_is_allowed(param: str, values: list[object], hint: str) -> None:
    for value in values:
        with pytest.raises(ParameterError, match=hint) as error:
            SamplingParams(**{param: value}).validate()  # type: ignore[arg-type]
        assert error.value.param == param


def test_values_at_the_edges_of_their_range_are_accepted() -> None:
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0, top_p=1, min_p=0, top_k=-1, max_tokens=1, seed=0),
        SamplingParams(temperature=2, top_p=0.0001, min_p=1, top_k=10**9, seed=2**64 - 1, stop=("x",) * 16),
        SamplingParams(seed=-(2**63), stop=("a" * 1024,)),
    ):
        params.validate()
