"""What a text completion goes on from: one prompt or several, as text or as token ids, or a gap between two texts."""

import asyncio
from collections.abc import Sequence
from typing import cast

from engine.api_logprobs import spell_out
from engine.api_request import CompletionRequest
from engine.errors import bad_request
from engine.hosted import HostedModel
from engine.limits import check_prompt, check_text
from engine.tokenizer import Tokenizer

MAX_ANSWERS = 2048
"""Of one request, over all its prompts."""

_GAP_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""What stands before the text in front of a gap, before the text behind it, and before what fills it: of Qwen's and
Google's coders, of BigCode's and IBM's, of DeepSeek's."""
_GAP_ENDS = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<file_sep>", "<|cursor|>")
"""What some of them write where the gap is filled, and would write on behind it."""


async def read_prompts(model: HostedModel, body: CompletionRequest, answers: int) -> list[list[int]]:
    """Token ids of each prompt. `answers`: written for each. Raises ApiError naming what is wrong."""
    given = _apart(body.prompt)
    if not 1 <= len(given) * answers <= MAX_ANSWERS:
        text = f"One request takes from 1 prompt to {MAX_ANSWERS} answers, here are {len(given)} prompts"
        raise bad_request(f"{text} with {answers} answers each.", "prompt")
    if body.suffix and body.echo:
        raise bad_request("echo is not available with suffix: leave one of them out.", "echo")
    prompts = []
    for index, prompt in enumerate(given):
        ids = await read_prompt(model, prompt, body.suffix)
        check_prompt(model, ids, f"prompt[{index}]" if len(given) > 1 else "prompt")
        prompts.append(ids)
    return prompts


async def read_prompt(model: HostedModel, prompt: str | list[int], suffix: str | None) -> list[int]:
    """Token ids of a prompt, with a gap where there is a suffix. Raises ApiError where the model fills none."""
    marks = _gap_marks(model) if suffix else None
    ids = await _tokens(model, prompt, special=marks is None) if isinstance(prompt, str) else prompt
    if marks is None or suffix is None:
        return ids
    before, behind, fill = marks
    start = model.tokenizer.encode("", add_special=True)
    return [*start, before, *ids, behind, *await _tokens(model, suffix, special=False), fill]


def gap_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end what fills a gap, besides those that end any text."""
    ids = (tokenizer.token_id(name) for name in _GAP_ENDS)
    return tuple(id for id in ids if id is not None)


def echoes(model: HostedModel, body: CompletionRequest) -> list[str] | None:
    """Each prompt's text, where it is to stand before its answers."""
    if not body.echo:
        return None
    return [text if isinstance(text, str) else spell_out(model.tokenizer, text) for text in _apart(body.prompt)]


def _apart(given: str | Sequence[object]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [cast(list[int], given)]  # of one prompt
    if all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given):
        return cast(list[str | list[int]], list(given))
    raise bad_request("prompt must be a text, token ids, or a list of one of these, not a mixture.", "prompt")


async def _tokens(model: HostedModel, text: str, *, special: bool) -> list[int]:
    await asyncio.to_thread(check_text, model, text)
    return await asyncio.to_thread(model.tokenizer.encode, text, add_special=special)


def _gap_marks(model: HostedModel) -> tuple[int, int, int]:
    for names in _GAP_MARKS:
        before, behind, fill = (model.tokenizer.token_id(name) for name in names)
        if before is not None and behind is not None and fill is not None:
            return before, behind, fill
    text = f"{model.name} has no tokens that mark a gap: leave suffix out, or choose a model that fills in the middle."
    raise bad_request(text, "suffix")
