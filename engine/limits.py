"""What a prompt may be at most for a model to answer it."""

from functools import lru_cache

from engine.batch import BLOCK_TOKENS
from engine.errors import ApiError
from engine.hosted import HostedModel
from engine.layout import blocks_for
from engine.tokenizer import SPACE, Tokenizer


def check_prompt(model: HostedModel, prompt: list[int], param: str = "prompt") -> None:
    """Raise ApiError (400) for a prompt, given as `param`, that this model can never answer."""
    if not prompt:
        raise ApiError(400, "The prompt is empty: give it at least one token.", param="prompt", code="empty_prompt")
    _check_length(model, len(prompt))
    vocabulary = model.runner.config.vocab_size
    if (highest := max(prompt)) >= vocabulary:
        raise ApiError(
            400,
            f"The {param} has the token id {highest}, but {model.name} knows only ids below {vocabulary}.",
            param=param,
            code="invalid_token_id",
        )


def check_text(model: HostedModel, text: str) -> None:
    """Raise ApiError (400) for a text too long for this model however it is cut into tokens, without cutting it.

    A tokenizer's normaliser may shorten text a little, by composing accents; the longest token is so far above the
    usual one that no text worth sending is near this bound.
    """
    size = len(text.replace(SPACE, " ").encode(errors="replace"))
    _check_length(model, -(-size // longest_token(model.tokenizer)), "at least ")


@lru_cache(maxsize=16)
def longest_token(tokenizer: Tokenizer) -> int:
    """Most bytes of text that one token can stand for; SPACE counts as the space that it spells."""
    names = (name.encode() for name in tokenizer.control_tokens)
    return max(len(spelt) for spelt in (*map(tokenizer.token_bytes, range(tokenizer.vocab_size)), *names))


def check_answer(model: HostedModel, prompt: int, max_tokens: int | None) -> None:
    """Raise ApiError (400) where `prompt` tokens and an answer of `max_tokens` can never be in memory together.

    An answer that would outgrow the context is cut there, so it takes no more than that; one of open length is cut
    where the memory ends.
    """
    if max_tokens is None:
        return
    tokens = min(prompt + max_tokens, model.max_context)
    needed, pool = blocks_for(tokens), model.pool_tokens // BLOCK_TOKENS
    if needed > pool:
        raise ApiError(
            400,
            f"A prompt of {prompt} tokens and up to {tokens - prompt} tokens of answer need {needed} KV blocks, but "
            f"{model.name} has {pool}: lower max_tokens, shorten the prompt, or give the engine more --kv-memory.",
            param="max_tokens",
            code="context_length_exceeded",
        )


def _check_length(model: HostedModel, count: int, bound: str = "") -> None:
    """Raise ApiError (400) when `count` tokens leave no room for an answer; `bound` goes before the number."""
    if count >= model.max_context:
        raise ApiError(
            400,
            f"The prompt has {bound}{count} tokens, but {model.name} has a context of {model.max_context} tokens for "
            "prompt and answer together: shorten the prompt.",
            code="context_length_exceeded",
        )
    if count >= model.pool_tokens:
        raise ApiError(
            400,
            f"The prompt has {bound}{count} tokens, but {model.name} has KV memory for {model.pool_tokens} tokens, "
            "prompt and answer together: shorten the prompt, or start the engine with more --kv-memory.",
            code="context_length_exceeded",
        )
