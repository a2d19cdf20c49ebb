"""What one request asks of sampling, and what values are allowed."""

import math
from dataclasses import dataclass

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 256
MAX_BIASED = 1024
MAX_LOGPROBS = 20
"""Most alternatives that a request may ask for at each token."""


class ParameterError(ValueError):
    """A sampling parameter has a value out of its range. `param` is its name, the message says what is allowed."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request asks of sampling. The defaults are the API's: the model's own distribution, until it ends."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the best token always."""
    top_p: float = 1.0
    """Keep the smallest set of best tokens whose probabilities (after top_k) reach this sum; 1 keeps all."""
    top_k: int = 0
    """Keep this many best tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the best one."""
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens. None: different every time."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time the answer has it."""
    presence_penalty: float = 0.0
    """Taken once from the logit of each token that the answer has."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens that prompt or answer have."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids with what is added to their logits."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the answer may not have."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    include_stop: bool = False
    """The text ends after it instead."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text besides the model's own; none of them is shown."""
    min_tokens: int = 0
    """Before this many tokens nothing ends the text but max_tokens."""
    max_tokens: int | None = None
    """At most this many tokens; None: until the context is full; 0 only scores the prompt."""
    ignore_eos: bool = False
    """Go on after the model ends its text."""
    logprobs: int | None = None
    """Report the log-probability of each token of the answer, and this many best ones in its place."""
    prompt_logprobs: int | None = None
    """The same for the prompt."""

    def validate(self) -> None:
        """Raise ParameterError for the first parameter out of its range."""
        _check_float("temperature", self.temperature, 0, 2)
        _check_float("top_p", self.top_p, 0, 1, above=True)
        _check_float("min_p", self.min_p, 0, 1)
        _check_float("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_float("presence_penalty", self.presence_penalty, -2, 2)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 10)  # far below, logits overflow
        if not _is_int(self.top_k) or self.top_k < -1:
            raise ParameterError("top_k", f"top_k must be a whole number from 1 up, or 0 or -1 for all: {self.top_k}")
        if self.seed is not None and not (_is_int(self.seed) and -(2**63) <= self.seed < 2**64):
            raise ParameterError("seed", f"seed must be a whole number of at most 64 bits, or null: {self.seed}")
        self._check_lengths()
        self._check_stops()
        if len(self.logit_bias) > MAX_BIASED:
            raise ParameterError("logit_bias", f"logit_bias takes at most {MAX_BIASED} tokens")
        for _, bias in self.logit_bias:
            _check_float("logit_bias", bias, -100, 100)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not (_is_int(count) and 0 <= count <= MAX_LOGPROBS):
                raise ParameterError(name, f"{name} must be a whole number from 0 to {MAX_LOGPROBS}: {count}")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 0):
            raise ParameterError("max_tokens", f"max_tokens must be a whole number of at least 1: {self.max_tokens}")
        if not _is_int(self.min_tokens) or self.min_tokens < 0:
            raise ParameterError("min_tokens", f"min_tokens must be a whole number from 0 up: {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens", f"min_tokens must be at most max_tokens, {self.max_tokens}: {self.min_tokens}"
            )

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"stop takes at most {MAX_STOP_STRINGS} strings, here are {len(self.stop)}")
        if not all(isinstance(text, str) and 1 <= len(text) <= MAX_STOP_LENGTH for text in self.stop):
            raise ParameterError("stop", f"each stop string must have 1 to {MAX_STOP_LENGTH} characters")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_float(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (above and value == low):
        allowed = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise ParameterError(name, f"{name} must be a number {allowed}: {value}")
