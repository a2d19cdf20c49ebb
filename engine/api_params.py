"""A decoded request's parameters as the engine wants them, each checked and named where it is wrong."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from engine.api_request import ChatRequest, CompletionRequest
from engine.errors import bad_request
from engine.hosted import HostedModel
from engine.sampling_params import MAX_BAD_WORDS, MAX_LOGPROBS, MAX_STOP_LENGTH, ParameterError, SamplingParams
from engine.tokenizer import Tokenizer

COMPLETION_DEFAULT_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; chat has none."""

MAX_CHOICES = 128

_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")

SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "min_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "prompt_logprobs",
)


def sampling_params(request: ChatRequest | CompletionRequest, model: HostedModel) -> SamplingParams:
    """The request's sampling parameters, defaults filled in; raises ApiError naming the one that is out of range."""
    given: dict[str, Any] = {name: value for name in SAME_NAME if (value := getattr(request, name)) is not None}
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    vocabulary = model.runner.config.vocab_size
    given |= {"max_tokens": _limit(request), "logprobs": _logprobs(request)}
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        given["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    params = SamplingParams(
        **given,
        stop=stop,
        include_stop=bool(request.include_stop_str_in_output),
        stop_token_ids=known_tokens(request.stop_token_ids or [], vocabulary, "stop_token_ids"),
        logit_bias=_biases(request.logit_bias or {}, vocabulary),
        bad_words=_words(request.bad_words or [], model.tokenizer),
    )
    try:
        params.validate()
    except ParameterError as error:
        raise bad_request(f"{error}.", error.param) from error
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("prompt_logprobs is not available with stream: true.", "prompt_logprobs")
    if request.deterministic and not model.runner.batch_invariant:
        raise bad_request(
            "deterministic needs a number format whose results do not depend on the batch: start the engine with "
            "--dtype int8.",
            "deterministic",
        )
    return params


def choices(request: ChatRequest | CompletionRequest) -> tuple[int, int]:
    """How many answers to give, and how many to write and choose them from."""
    count = 1 if request.n is None else request.n
    if not 1 <= count <= MAX_CHOICES:
        raise bad_request(f"n must be from 1 to {MAX_CHOICES}, not {count}.", "n")
    drafts = request.best_of if isinstance(request, CompletionRequest) else None
    if drafts is None:
        return count, count
    if not count <= drafts <= MAX_CHOICES:
        raise bad_request(f"best_of must be from n, {count}, to {MAX_CHOICES}, not {drafts}.", "best_of")
    if request.stream and drafts > count:
        raise bad_request("best_of above n is not available with stream: true.", "best_of")
    return count, drafts


def _limit(request: ChatRequest | CompletionRequest) -> int | None:
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise bad_request("Give max_tokens or max_completion_tokens, not both.", "max_tokens")
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if limit == 0 and isinstance(request, CompletionRequest) and request.echo:
        return 0
    if limit is not None and limit < 1:
        raise bad_request(f"{name} must be at least 1, not {limit}.", name)
    return COMPLETION_DEFAULT_TOKENS if limit is None and isinstance(request, CompletionRequest) else limit


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_LOGPROBS:
        raise bad_request(f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {request.top_logprobs}.", "top_logprobs")
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise bad_request("top_logprobs is only allowed together with logprobs: true.", "top_logprobs")
    return None


def _biases(biases: Mapping[str, float], vocabulary: int) -> tuple[tuple[int, float], ...]:
    for token in biases:
        # In one spelling only, so that no token comes twice.
        if not _TOKEN_ID.fullmatch(token):
            text = f"logit_bias maps token ids to numbers, and {reprlib.repr(token)} is no token id."
            raise bad_request(text, "logit_bias")
    ids = [int(token) for token in biases]
    return tuple(zip(known_tokens(ids, vocabulary, "logit_bias"), biases.values(), strict=True))


def known_tokens(ids: Sequence[int], vocabulary: int, param: str) -> tuple[int, ...]:
    for token in ids:
        if not 0 <= token < vocabulary:
            text = f"{param} has the token id {token}, but this model knows only ids from 0 to {vocabulary - 1}."
            raise bad_request(text, param, "invalid_token_id")
    return tuple(ids)


def _words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens, as the word is spelled at the start of a text and after a space."""
    if not all(words):
        raise bad_request("bad_words must not have an empty string.", "bad_words")
    if len(words) > MAX_BAD_WORDS or max(map(len, words), default=0) > MAX_STOP_LENGTH:
        text = f"bad_words takes at most {MAX_BAD_WORDS} words of at most {MAX_STOP_LENGTH} characters."
        raise bad_request(text, "bad_words")
    spelled = [tuple(tokenizer.encode_plain(text)) for word in words for text in (word, f" {word.lstrip(' ')}")]
    return tuple(dict.fromkeys(spelled))
