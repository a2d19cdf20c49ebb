"""Models that think before they answer: `<think>…</think>` told apart from the answer, in the text and in the count.

A template may open the thinking itself, so that the answer begins inside; else the model opens it, or does not think.
White space around the thinking belongs to neither side.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.detokenizer import overlap
from engine.logits import Grammar
from engine.pieces import Piece, Splitter
from engine.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


def thinks(tokenizer: Tokenizer) -> bool:
    """Whether the model was made to think: its template or its vocabulary has the marks."""
    return CLOSE in (tokenizer.chat_template or "") or tokenizer.token_id(CLOSE) is not None


Phase = Literal["undecided", "thinking", "answering"]


def phase_after(prompt: Sequence[int], spell: Callable[[int], bytes]) -> Phase:
    """Where a chat's prompt leaves the model: inside the thinking, past it, or to decide for itself."""
    end = b"".join(map(spell, prompt[-16:])).rstrip()
    if end.endswith(CLOSE.encode()):
        return "answering"
    return "thinking" if end.endswith(OPEN.encode()) else "undecided"


class ThinkingMeter:
    """Counts the tokens of an answer that are thinking, from its first token up to and with the closing mark."""

    def __init__(self, spell: Callable[[int], bytes], opened: bool) -> None:
        """`spell` gives a token's bytes, those of the marks too where they are control tokens."""
        self._spell = spell
        self._seen = b""
        self._tokens = 0
        self.count = 0
        self.inside = opened
        self.begun = opened
        """False as long as the answer may still turn out to begin with thinking."""

    def push(self, token: int) -> None:
        if self.begun and not self.inside:
            return
        self._tokens += 1
        self._seen += self._spell(token)
        if not self.begun:
            text = self._seen.lstrip()
            if text.startswith(OPEN.encode()):
                self.begun = self.inside = True
            elif not OPEN.encode().startswith(text):
                self.begun = True
        if self.inside:
            self.count = self._tokens
            self.inside = CLOSE.encode() not in self._seen
            self._seen = self._seen[-len(CLOSE) :]


class AfterThinking:
    """A grammar for what follows the thinking, or for the whole answer of a model that does not think this time."""

    def __init__(self, grammar: Grammar, meter: ThinkingMeter, open_token: int | None) -> None:
        """`meter` is this object's own. `open_token` begins the thinking; without one only the prompt can open it."""
        self._grammar = grammar
        self._meter = meter
        self._open = open_token

    @property
    def failure(self) -> str:
        return self._grammar.failure

    def mask(self) -> NDArray[np.int32] | None:
        if self._meter.inside:
            return None
        words = self._grammar.mask()
        if words is not None and self._open is not None and not self._meter.begun:
            words.view(np.uint32)[self._open // 32] |= np.uint32(1 << self._open % 32)
        return words

    def accept(self, token: int) -> bool:
        thinking = self._meter.inside or (not self._meter.begun and token == self._open)
        self._meter.push(token)
        return thinking or self._grammar.accept(token)


class ReasoningSplitter:
    """Takes the thinking off the front of an answer; the rest goes through the splitter `inner`."""

    def __init__(self, inner: Splitter, opened: bool) -> None:
        self._inner = inner
        self._inside, self._begun = opened, opened
        self._held = ""
        self._said = False
        """Whether any thinking has been returned."""
        self._answering = False

    def push(self, text: str) -> list[Piece]:
        if self._answering:
            return self._inner.push(text)
        self._held += text
        if not self._begun:
            start = self._held.lstrip()
            if start.startswith(OPEN):
                self._begun = self._inside = True
                self._held = start.removeprefix(OPEN)
            elif OPEN.startswith(start):
                return []
            else:
                self._begun = True
                return self._rest()
        return self._think() if self._inside else self._answer()

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._inside:
            return self._thought(held.rstrip()) + self._inner.finish()
        return self._inner.push(held) + self._inner.finish()

    def _think(self) -> list[Piece]:
        thought, close, rest = self._held.partition(CLOSE)
        if close:
            self._inside = False
            self._held = rest
            return self._thought(thought.rstrip()) + self._answer()
        sure = thought[: len(thought) - overlap(thought, CLOSE)].rstrip()
        self._held = thought[len(sure) :]
        return self._thought(sure)

    def _thought(self, text: str) -> list[Piece]:
        text = text if self._said else text.lstrip()
        self._said = self._said or bool(text)
        return [Piece(reasoning=text)] if text else []

    def _answer(self) -> list[Piece]:
        """What follows the thinking, once it has more than white space."""
        self._held = self._held.lstrip()
        return self._rest() if self._held else []

    def _rest(self) -> list[Piece]:
        self._answering = True
        held, self._held = self._held, ""
        return self._inner.push(held)
