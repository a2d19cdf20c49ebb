"""A small real tokenizer: a token for each byte, some words, control tokens and added ones, no merges."""

from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.logits import Grammar
from engine.tokenizer import BYTE_OF_CHARACTER, Tokenizer


def byte_tokenizer(
    template: str | None = None, *, control: Sequence[str] = (), added: Sequence[str] = (), add_bos: bool = False
) -> Tokenizer:
    """`control` tokens have no text of their own, `added` ones have; `<s>` and `<eos>` are always there."""
    vocab = {character: i for i, character in enumerate(BYTE_OF_CHARACTER)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in ("<s>", "<eos>", *control)])
    backend.add_tokens([AddedToken(name, normalized=False) for name in added])
    special = {"bos_token": "<s>", "eos_token": "<eos>"}
    return Tokenizer(backend, "byte-level", special_tokens=special, add_bos=add_bos, chat_template=template)


def allowed(grammar: Grammar) -> set[int]:
    """The tokens that a grammar lets come next."""
    words = grammar.mask()
    assert words is not None
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())
