"""What an answer's text is made of once it has been taken apart: plain content, reasoning, and tool calls."""

from typing import NamedTuple, Protocol


class CallDelta(NamedTuple):
    """A part of tool call `number`, from 0; the `arguments` of its parts, joined, are its JSON."""

    number: int
    id: str | None = None
    """Set on the call's first part, as `name` is."""
    name: str | None = None
    arguments: str = ""


class Piece(NamedTuple):
    """The next part of an answer: exactly one of the three is set."""

    content: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


class Splitter(Protocol):
    """Takes one choice's text apart as it comes. What it has returned never has to be taken back."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """What was held back, once the text has ended."""


class PlainText:
    """The splitter of an answer that has nothing but content."""

    def push(self, text: str) -> list[Piece]:
        return [Piece(text)] if text else []

    def finish(self) -> list[Piece]:
        return []
