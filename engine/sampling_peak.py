"""How much memory the sampling of the largest batch takes, found out by doing it."""

from dataclasses import replace

import torch
from torch import Tensor

from engine.draw import ROWS, Row, draw_rows
from engine.logits import TokenRules
from engine.memory import peak_memory_since
from engine.sampling_params import MAX_LOGPROBS, SamplingParams

EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.99,
    min_p=1e-9,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    bad_words=((0,),),
    min_tokens=1,
    logprobs=MAX_LOGPROBS,
)


def sampling_peak(vocabulary: int, rows: int) -> int:
    """Bytes for the logits of `rows` rows and for drawing a token from each with everything a caller may ask for."""
    return peak_memory_since(lambda: draw_the_most(vocabulary, rows))


def draw_the_most(vocabulary: int, rows: int) -> None:
    kinds = (EVERYTHING, replace(EVERYTHING, top_p=1.0), replace(EVERYTHING, top_p=1.0, top_k=50))
    with torch.inference_mode():
        logits = _logits(vocabulary, rows)
        prompt = range(min(vocabulary, 4096))
        # Rows are drawn in groups: after two of them memory has been used and given back as it will be for all.
        wanted = [kinds[row % len(kinds)] for row in range(min(rows, 2 * ROWS))]
        some = [Row(params, row, 0, TokenRules(params, prompt, [0])) for row, params in enumerate(wanted)]
        draw_rows(logits[: len(some)], some)


def _logits(vocabulary: int, rows: int) -> Tensor:
    """[rows, vocabulary] steep enough for the quick way, but for one flat row, which is sorted as a whole."""
    logits = torch.empty(rows, vocabulary)
    logits.copy_(torch.arange(vocabulary) * -0.1)
    logits[0] = 0
    return logits
