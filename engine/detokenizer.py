"""Tokens to text while they are generated: whole characters only, and nothing of a stop string."""

import codecs
from collections.abc import Sequence

from engine.tokenizer import Tokenizer


class Detokenizer:
    """One request's output text. The work per token does not grow with the text already sent.

    `push` each sampled token and send what it returns; call `finish` at the end. What `push` and `finish` returned,
    joined, is the decoded text of all tokens, or its part before the stop string that was completed first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`stop`: non-empty strings. `include_stop`: the text ends after the stop string, not before it.

        `shown`: control tokens that are written out, where others have no text.
        """
        self._tokenizer = tokenizer
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        """Text not returned yet because a stop string may have begun in it; shorter than the longest stop string."""
        self.stopped = False
        """A stop string was completed: the request has ended, whatever else is pushed."""

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Text that is now safe to send, often empty: no half characters, nothing that may become a stop string.

        Unless it `may_stop`, the text so far is not looked at for stop strings, now or later.
        """
        spell = self._tokenizer.spell if token_id in self._shown else self._tokenizer.token_bytes
        text = self._utf8.decode(spell(token_id))
        return self._release(text) if may_stop else text

    def finish(self, *, cut: bool = False) -> str:
        """The text still held back. Call once, when the request ends.

        A character whose last bytes never came reads U+FFFD if the model itself ended the text there, and is left out
        if the text was `cut` (by max_tokens or an abort).
        """
        text = self._release("" if cut else self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        matches = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            self.stopped = True
            self._held = ""
            # The first to be completed wins, so that the answer does not depend on where tokens end.
            end, at = min(matches)
            return text[: end if self._include_stop else at]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
