"""Reads tool calls from an answer's text as it comes, in the formats of engine.tools.formats."""

import uuid
from collections.abc import Callable, Iterable

from engine.detokenizer import overlap
from engine.pieces import CallDelta, Piece
from engine.tools.call_reader import CallReader

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON = "<|python_tag|>"

SEPARATORS = "; ,\t\r\n"
"""What Llama models put between calls."""


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class _Calls:
    """The calls of one answer, numbered from 0."""

    def __init__(self, names: Iterable[str], parallel: bool, new_id: Callable[[], str] = _new_id) -> None:
        self._names, self._parallel, self._new_id = frozenset(names), parallel, new_id
        self.count = 0

    def reader(self) -> CallReader:
        return CallReader(self.count, self._new_id(), self._names)

    def shown(self, parts: list[CallDelta]) -> list[Piece]:
        """Further calls of an answer that may have one only are left out."""
        return [Piece(call=part) for part in parts if self._parallel or part.number == 0]


class HermesSplitter:
    """Calls stand between tags; what stands around them is content, without the white space next to the tags.

    Small models forget the tags: an object that is a call, at the start or after a call, is one without them too.
    """

    def __init__(self, names: Iterable[str], parallel: bool) -> None:
        self._calls = _Calls(names, parallel)
        self._held = ""
        self._reader: CallReader | None = None
        self._closing = False
        """Between a call and its closing tag."""
        self._opening = ""
        """What stood before the call being read: a tag, or white space."""
        self._expecting = True
        """Nothing but white space has come since the start or the last call."""

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while True:
            before = (len(self._held), self._reader, self._closing)
            if self._reader is not None:
                pieces += self._read_call(self._reader)
            elif self._closing:
                self._read_closing()
            else:
                pieces += self._read_content()
            if before == (len(self._held), self._reader, self._closing):
                return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._reader is not None and not self._reader.said:
            held = self._opening + self._reader.text
        elif self._closing or (self._calls.count and not held.strip()):
            held = ""
        return [Piece(held)] if held else []

    def _read_content(self) -> list[Piece]:
        if self._expecting and self._calls.count:
            self._held = self._held.lstrip()
        content, tag, rest = self._held.partition(OPEN)
        if self._expecting and self._held.lstrip().startswith("{"):
            rest = self._held.lstrip()
            self._opening = self._held[: len(self._held) - len(rest)]
            self._reader, self._held, content = self._calls.reader(), rest, ""
        elif tag:
            self._reader, self._held, self._opening = self._calls.reader(), rest, OPEN
            content = content.rstrip()
        else:
            content = content[: len(content) - overlap(content, OPEN)].rstrip()
            self._held = self._held[len(content) :]
        if not content:
            return []
        self._expecting = False
        return [Piece(content)]

    def _read_call(self, reader: CallReader) -> list[Piece]:
        parts, self._held = reader.push(self._held)
        pieces = self._calls.shown(parts)
        if reader.broken and not reader.said:
            self._reader, self._expecting = None, False
            return [Piece(self._opening + reader.text)]
        if reader.broken or reader.done:
            self._reader, self._closing, self._expecting = None, True, True
            self._calls.count += 1
        return pieces

    def _read_closing(self) -> None:
        """Drop the closing tag; a model that leaves it out goes on at once."""
        rest = self._held.lstrip()
        if rest.startswith(CLOSE):
            self._closing, self._held = False, rest.removeprefix(CLOSE)
        elif rest and not CLOSE.startswith(rest):
            self._closing, self._held = False, rest


class LlamaSplitter:
    """An answer that begins with a call is calls throughout; any other is content."""

    def __init__(self, names: Iterable[str], parallel: bool) -> None:
        self._calls = _Calls(names, parallel)
        self._held = ""
        self._reader: CallReader | None = None
        self._prefix = ""
        """What stood before the call being read."""
        self._content = False

    def push(self, text: str) -> list[Piece]:
        if self._content:
            return [Piece(text)] if text else []
        pieces: list[Piece] = []
        self._held += text
        while self._held and not self._content:
            if self._reader is None:
                waiting, more = self._between()
                pieces += more
                if waiting:
                    break
            else:
                pieces += self._read_call(self._reader)
        return pieces

    def finish(self) -> list[Piece]:
        held = self._held
        if self._reader is not None:
            held = "" if self._reader.said else self._prefix + self._reader.text
        elif self._calls.count and not held.strip(SEPARATORS):
            held = ""
        self._held = ""
        return [Piece(held)] if held else []

    def _between(self) -> tuple[bool, list[Piece]]:
        """Look for the next call's start; True while more text must come to tell."""
        rest = self._held.lstrip(SEPARATORS if self._calls.count else " \t\r\n")
        tagged = rest.removeprefix(PYTHON).lstrip() if rest.startswith(PYTHON) else rest
        if tagged.startswith("{"):
            self._prefix = self._held[: len(self._held) - len(tagged)]
            self._reader, self._held = self._calls.reader(), tagged
            return False, []
        if not tagged or PYTHON.startswith(rest):
            return True, []
        return False, self._give_up(self._held)

    def _read_call(self, reader: CallReader) -> list[Piece]:
        parts, self._held = reader.push(self._held)
        pieces = self._calls.shown(parts)
        if reader.broken and not reader.said:
            return self._give_up(self._prefix + reader.text + self._held)
        if reader.broken or reader.done:
            self._reader = None
            self._calls.count += 1
        return pieces

    def _give_up(self, text: str) -> list[Piece]:
        self._content, self._held, self._reader = True, "", None
        return [Piece(text)]
