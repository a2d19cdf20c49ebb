"""Counts as Anthropic reports them: what came from the cache and what was written to it stand beside the input."""

from typing import Any

import msgspec

from gateway.upstreams.usage import Usage


class _Details(msgspec.Struct):
    thinking_tokens: int | None = None


class _Reported(msgspec.Struct):
    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_details: _Details | None = None


class Counts:
    """The counts of one answer so far: each report is cumulative, and leaves out what has not changed."""

    def __init__(self) -> None:
        self._input = self._read = self._written = self._output = self._thinking = 0
        self._known = False

    def take(self, given: dict[str, Any] | None) -> tuple[Usage | None, str | None]:
        """(usage as OpenAI has it, None before the first report; what was odd in this one)."""
        if given is None:
            return self._usage(), None
        try:
            new = msgspec.convert(given, _Reported)
        except msgspec.ValidationError as error:
            return self._usage(), f"usage: {error}"
        self._known = True
        self._input = _latest(new.input_tokens, self._input)
        self._read = _latest(new.cache_read_input_tokens, self._read)
        self._written = _latest(new.cache_creation_input_tokens, self._written)
        self._output = _latest(new.output_tokens, self._output)
        if new.output_tokens_details is not None:
            self._thinking = _latest(new.output_tokens_details.thinking_tokens, self._thinking)
        return self._usage(), None

    def _usage(self) -> Usage | None:
        if not self._known:
            return None
        prompt = self._input + self._read + self._written
        return Usage.of(prompt, self._output, cached=self._read, written=self._written, reasoning=self._thinking)


def _latest(new: int | None, old: int) -> int:
    return old if new is None else new
