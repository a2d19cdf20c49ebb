"""Log-probabilities as the APIs write them: OpenAI's two shapes, and vLLM's for prompts."""

import codecs
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from engine.logprobs import TokenScore
from engine.tokenizer import Tokenizer


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    """Null for a control token, which has no text."""


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each token of the prompt; null for the first one, before which there is nothing."""


@lru_cache(maxsize=16)
def _control_names(tokenizer: Tokenizer) -> dict[int, str]:
    return {id: name for name, id in tokenizer.control_tokens.items()}


def spell(tokenizer: Tokenizer, token: int) -> str:
    """How a token reads on its own: its text, a control token's name, or `bytes:\\xf0\\x9f` for half a character."""
    name = _control_names(tokenizer).get(token)
    if name is not None:
        return name
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def spell_out(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of the tokens, control tokens by name; U+FFFD stands where they do not spell valid UTF-8."""
    names = _control_names(tokenizer)
    parts = [names[id].encode() if id in names else tokenizer.token_bytes(id) for id in tokens]
    return b"".join(parts).decode(errors="replace")


def _bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    return None if token in _control_names(tokenizer) else list(tokenizer.token_bytes(token))


def chat_logprobs(tokenizer: Tokenizer, scores: Sequence[TokenScore]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatLogprob(
                spell(tokenizer, score.token),
                score.logprob,
                _bytes(tokenizer, score.token),
                [TopLogprob(spell(tokenizer, id), logprob, _bytes(tokenizer, id)) for id, logprob in score.top],
            )
            for score in scores
        ]
    )


class TextOffsets:
    """Where in one choice's text each of its tokens begins."""

    def __init__(self, tokenizer: Tokenizer, start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = start

    def next(self, token: int, *, written: bool = False) -> int:
        """Where the token begins; `written`: the text has control tokens written out."""
        begin = self._at
        spell = self._tokenizer.spell if written else self._tokenizer.token_bytes
        self._at += len(self._utf8.decode(spell(token)))
        return begin


def text_logprobs(
    tokenizer: Tokenizer,
    offsets: TextOffsets,
    scores: Sequence[TokenScore],
    top: int,
    *,
    first: int | None = None,
    echo: str = "",
) -> TextLogprobs:
    """`first`: a token that stands before all others and has no score; then they are those of the text `echo`."""
    ids = [score.token for score in scores]
    lead = [] if first is None else [first]
    tops: list[dict[str, float] | None] = [None for _ in lead]
    for score in scores:
        # The token itself is always among them (OpenAI's legacy API gives up to one more than asked).
        best = {spell(tokenizer, id): logprob for id, logprob in score.top}
        tops.append({**best, spell(tokenizer, score.token): score.logprob})
    # A token that the engine put before the prompt is not in its text.
    begins = [offsets.next(id, written=echo.startswith(spell(tokenizer, id))) for id in lead]
    return TextLogprobs(
        begins + [offsets.next(id, written=bool(lead)) for id in ids],
        [*(None for _ in lead), *(score.logprob for score in scores)],
        [spell(tokenizer, id) for id in (*lead, *ids)],
        tops if top else None,
    )


def prompt_logprobs(tokenizer: Tokenizer, scores: Sequence[TokenScore], top: int) -> PromptLogprobs:
    rows: PromptLogprobs = [None]
    for score in scores:
        ranked = {id: (logprob, rank) for rank, (id, logprob) in enumerate(score.top[:top], 1)}
        ranked[score.token] = (score.logprob, score.rank)
        rows.append({str(id): PromptLogprob(*found, spell(tokenizer, id)) for id, found in ranked.items()})
    return rows
