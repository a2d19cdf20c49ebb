"""What a request does to its logits before a token is drawn: penalties, biases, forbidden tokens, a grammar's mask."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling_params import SamplingParams

Ids = NDArray[np.int64]


class Grammar(Protocol):
    """What an answer may look like, token by token. Used on the step loop's thread only."""

    def mask(self) -> NDArray[np.int32] | None:
        """Bits of the tokens allowed next, token t at bit t % 32 of word t // 32; None allows all."""

    def accept(self, token: int) -> bool:
        """Go on past a sampled token; False when the answer can't go on with it."""

    @property
    def failure(self) -> str:
        """Why `accept` said no, as a sentence."""


class TokenRules:
    """One sequence's penalties, bias and forbidden tokens. The work per token does not grow with the text.

    Frequency and presence penalty count the answer's tokens (OpenAI); the repetition penalty looks at prompt and
    answer (Keskar et al., 2019, "CTRL").
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], ends: Iterable[int]) -> None:
        """`ends`: the tokens that end the text, which min_tokens holds off."""
        self.params = params
        self.ends = np.array(sorted({*(() if params.ignore_eos else ends), *params.stop_token_ids}), np.int64)
        self.penalised = bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1)
        self.output: list[int] = []
        self.bias_ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._slot: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)
        if params.repetition_penalty != 1:
            for token in dict.fromkeys(prompt):
                self._add(token)

    @property
    def seen(self) -> tuple[Ids, NDArray[np.float32]]:
        """Distinct tokens that penalties may touch, and how often the answer has each."""
        return self._ids[: len(self._slot)], self._counts[: len(self._slot)]

    def push(self, token: int) -> None:
        """Note a sampled token."""
        self.output.append(token)
        if self.penalised:
            slot = self._add(token)
            self._counts[slot] += 1

    def forbidden(self) -> Ids:
        """Tokens that must not come next."""
        last = [word[-1] for word in self.params.bad_words if _ends_with(self.output, word[:-1])]
        banned = np.array(last, np.int64)
        return np.concatenate((banned, self.ends)) if len(self.output) < self.params.min_tokens else banned

    def _add(self, token: int) -> int:
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token
        return slot


def needs_rules(params: SamplingParams) -> bool:
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1
        or params.logit_bias
        or params.bad_words
        or params.min_tokens
    )


def _ends_with(tokens: list[int], tail: tuple[int, ...]) -> bool:
    return not tail or tuple(tokens[-len(tail) :]) == tail


def apply_rules(logits: Tensor, rules: Sequence[tuple[int, TokenRules]]) -> None:
    """Change `logits` [L, V] in place for the rows that have rules, each row by its own alone."""
    if not rules:
        return
    flat, width = logits.view(-1), logits.shape[1]
    penalised = [(row, rule) for row, rule in rules if rule.penalised]
    if penalised:
        _penalise(flat, width, penalised)
    biased = [(row, rule) for row, rule in rules if len(rule.bias)]
    if biased:
        places = np.concatenate([rule.bias_ids + row * width for row, rule in biased])
        flat.index_add_(0, _to(flat, places), _to(flat, np.concatenate([rule.bias for _, rule in biased])))
    places = np.concatenate([rule.forbidden() + row * width for row, rule in rules])
    if len(places):
        flat.index_fill_(0, _to(flat, places), -torch.inf)


def _penalise(flat: Tensor, width: int, rules: Sequence[tuple[int, TokenRules]]) -> None:
    seen = [rule.seen for _, rule in rules]
    sizes = [len(ids) for ids, _ in seen]
    places = _to(flat, np.concatenate([ids + row * width for (row, _), (ids, _) in zip(rules, seen, strict=True)]))
    counts = _to(flat, np.concatenate([counts for _, counts in seen]))
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    repetition, frequency, presence = (
        _to(flat, np.repeat(np.array([getattr(rule.params, name) for _, rule in rules], np.float32), sizes))
        for name in names
    )
    values = flat[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    # A place comes up once: the tokens of a row are distinct.
    flat[places] = values - frequency * counts - presence * (counts > 0)


def _to(like: Tensor, values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def apply_grammars(logits: Tensor, grammars: Sequence[tuple[int, Grammar]]) -> None:
    """Take the tokens that a row's grammar does not allow out of `logits` [L, V], in place.

    Tokens past the end of a mask are not allowed.
    """
    masks = [(row, words) for row, grammar in grammars if (words := grammar.mask()) is not None]
    if not masks:
        return
    rows, width = [row for row, _ in masks], logits.shape[1]
    packed = np.zeros((len(masks), -(-width // 32)), np.int32)
    for into, (_, words) in zip(packed, masks, strict=True):
        into[: len(words)] = words[: len(into)]
    forbidden = np.unpackbits(packed.view(np.uint8), axis=1, count=width, bitorder="little") == 0
    if logits.device.type != "cpu":
        places = _to(logits, np.array(rows))
        logits[places] = logits[places].masked_fill(_to(logits, forbidden), -torch.inf)
    elif len(rows) == len(logits):  # through numpy: torch would wake all its threads for this
        np.copyto(logits.numpy(), -np.inf, where=forbidden)
    else:
        guided = logits.numpy()[rows]
        np.copyto(guided, -np.inf, where=forbidden)
        logits.numpy()[rows] = guided
