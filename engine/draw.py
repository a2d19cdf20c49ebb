"""The next token of each sequence in a step, with its score where one is wanted."""

from collections.abc import Sequence

from torch import Tensor

from engine.generation import Generation
from engine.logits import apply_grammars, apply_rules
from engine.logprobs import TokenScore, score
from engine.sampling import one_thread, sample

ROWS = 32
"""Rows drawn together: bounds what sampling needs in memory, whatever the batch."""


def draw(logits: Tensor, generations: Sequence[Generation]) -> list[tuple[int, TokenScore | None]]:
    """One token per row of `logits` [L, V], which are overwritten. A row's token depends on its own row alone."""
    drawn: list[tuple[int, TokenScore | None]] = []
    with one_thread():
        for start in range(0, len(generations), ROWS):
            drawn += _draw(logits[start : start + ROWS], generations[start : start + ROWS])
    return drawn


def _draw(logits: Tensor, generations: Sequence[Generation]) -> list[tuple[int, TokenScore | None]]:
    scored = [row for row, generation in enumerate(generations) if generation.params.logprobs is not None]
    own = logits[scored] if scored else None  # a copy: the model's own distribution, before what follows
    apply_rules(logits, [(row, g.rules) for row, g in enumerate(generations) if g.rules is not None])
    apply_grammars(logits, [(row, g.grammar) for row, g in enumerate(generations) if g.grammar is not None])
    tokens = sample(
        logits,
        [g.params for g in generations],
        [g.seed for g in generations],
        [len(g.sequence.tokens) for g in generations],
    )
    scores: list[TokenScore | None] = [None] * len(tokens)
    if own is not None:
        tops = [generations[row].params.logprobs or 0 for row in scored]
        for row, found in zip(scored, score(own, [tokens[row] for row in scored], tops), strict=True):
            scores[row] = found
    return list(zip(tokens, scores, strict=True))


def score_prompt(logits: Tensor, generation: Generation) -> None:
    """Add the scores of the next tokens of the prompt, whose rows `logits` [N, V] predict."""
    count = len(generation.prompt_scores) + 1
    tokens = generation.sequence.tokens[count : count + len(logits)]
    tops = [generation.params.prompt_logprobs or 0] * len(tokens)
    with one_thread():
        generation.prompt_scores += score(logits, tokens, tops)
