"""The next token of each sequence in a step, with its score where one is wanted."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.generation import Generation
from engine.logits import Grammar, TokenRules, apply_grammars, apply_rules
from engine.logprobs import TokenScore, score
from engine.sampling import Choose, choose, one_thread, sample
from engine.sampling_params import SamplingParams

ROWS = 32
"""Rows drawn together: bounds what sampling needs in memory, whatever the batch."""


class Row(NamedTuple):
    """What decides a row's token besides its logits."""

    params: SamplingParams
    seed: int
    position: int
    rules: TokenRules | None = None
    grammar: Grammar | None = None


def draw(
    logits: Tensor, generations: Sequence[Generation], choose: Choose = choose
) -> list[tuple[int, TokenScore | None]]:
    """The next token of each generation, from its row of `logits` [L, V], which are overwritten."""
    rows = [Row(g.params, g.seed, len(g.sequence.tokens), g.rules, g.grammar) for g in generations]
    return draw_rows(logits, rows, choose)


def draw_rows(logits: Tensor, rows: Sequence[Row], choose: Choose = choose) -> list[tuple[int, TokenScore | None]]:
    """One token per row of `logits` [L, V], which are overwritten. A row's token depends on its own row alone."""
    drawn: list[tuple[int, TokenScore | None]] = []
    with one_thread():
        for start in range(0, len(rows), ROWS):
            drawn += _draw(logits[start : start + ROWS], rows[start : start + ROWS], choose)
    return drawn


def _draw(logits: Tensor, rows: Sequence[Row], choose: Choose) -> list[tuple[int, TokenScore | None]]:
    scored = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    own = logits[scored] if scored else None  # a copy: the model's own distribution, before what follows
    apply_rules(logits, [(i, row.rules) for i, row in enumerate(rows) if row.rules is not None])
    apply_grammars(logits, [(i, row.grammar) for i, row in enumerate(rows) if row.grammar is not None])
    params, seeds, positions = ([getattr(row, name) for row in rows] for name in ("params", "seed", "position"))
    tokens = sample(logits, params, seeds, positions, choose)
    scores: list[TokenScore | None] = [None] * len(tokens)
    if own is not None:
        tops = [rows[i].params.logprobs or 0 for i in scored]
        for i, found in zip(scored, score(own, [tokens[i] for i in scored], tops), strict=True):
            scores[i] = found
    return list(zip(tokens, scores, strict=True))


def score_prompt(logits: Tensor, generation: Generation) -> None:
    """Add the scores of the next tokens of the prompt, whose rows `logits` [N, V] predict."""
    count = len(generation.prompt_scores) + 1
    tokens = generation.sequence.tokens[count : count + len(logits)]
    tops = [generation.params.prompt_logprobs or 0] * len(tokens)
    with one_thread():
        generation.prompt_scores += score(logits, tokens, tops)
