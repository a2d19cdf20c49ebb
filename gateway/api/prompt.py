"""What text completions and embeddings read: one text, its token ids, or a list of either."""

from typing import Any

from gateway.api.fields import Fields, invalid, required

Prompt = list[str] | list[list[int]]
"""One or more texts, or the token ids of one or more."""

_WORDS = "a string, an array of strings, an array of token ids or an array of such arrays"


def read_prompt(fields: Fields, name: str) -> Prompt:
    """The field `name` as a list. Raises ApiError 400 where it is none of the four forms, or empty."""
    given: str | list[Any] = required(fields, name, str | list[str | int | list[int]], _WORDS)
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid(name, "must not be empty")
    if all(isinstance(item, str) for item in given):
        return given
    if all(isinstance(item, int) for item in given):
        return [given]
    if all(isinstance(item, list) for item in given):
        return given
    raise invalid(name, f"must be {_WORDS}, not a mixture")


def as_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """What a router may look at: the texts as one user message; nothing where there are only token ids."""
    texts = [{"type": "text", "text": text} for text in prompt if isinstance(text, str)]
    return [{"role": "user", "content": texts}] if texts else []
