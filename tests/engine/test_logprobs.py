"""Log-probabilities: right, and the same bit for bit whatever the batch."""

import math

import pytest
import torch

from engine.logprobs import LEAST, score
from engine.sampling import choose, one_thread


@pytest.mark.parametrize("size", [151_936, 49_152, 1001])
def test_a_row_has_the_same_numbers_alone_and_among_44(size: int) -> None:
    logits = torch.randn(44, size, generator=torch.Generator().manual_seed(3)) * 4
    tokens = logits.argmax(-1).tolist()
    together = score(logits, tokens, [5] * 44)
    assert together == [score(logits[i : i + 1], tokens[i : i + 1], [5])[0] for i in range(44)]
    assert together[7:9] == score(logits[7:9], tokens[7:9], [5, 5])


def test_a_drawn_token_is_the_same_alone_and_among_44() -> None:
    logits = torch.randn(44, 151_936, generator=torch.Generator().manual_seed(3)) * 4
    generator = torch.Generator().manual_seed(4)
    temperature = torch.rand(44, generator=generator) * 2
    top_k = torch.where(torch.arange(44) % 3 == 0, 40, logits.shape[1])
    top_p = torch.where(torch.arange(44) % 2 == 0, 0.9, 1.0)
    min_p = torch.where(torch.arange(44) % 5 == 0, 0.05, 0.0)
    columns = (temperature, top_k, top_p, min_p, torch.rand(44, generator=generator))
    with one_thread():
        together = choose(logits, *columns).tolist()
        alone = [choose(logits[i : i + 1], *(c[i : i + 1] for c in columns)).item() for i in range(44)]
    assert together == alone


def test_scores_are_log_softmax_with_rank_and_alternatives() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -math.inf]])
    expected = logits[0].double().log_softmax(-1)
    (second,) = score(logits, [2], [2])
    assert second.logprob == pytest.approx(expected[2].item()) and second.rank == 2
    assert [token for token, _ in second.top] == [1, 2]
    (never,) = score(logits, [3], [4])
    assert never.logprob == LEAST and never.rank == 4 and never.top[-1] == (3, LEAST)
    assert score(logits, [1], [0])[0].top == ()
