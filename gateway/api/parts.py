"""An answer as a row of parts (thinking, text, tool calls), one after the other, out of chat deltas in any order.

Chat deltas may interleave the arguments of several tool calls. The formats that number their parts send each part whole
before the next, so here only the first unfinished part grows in the open; the others collect their text until it is
their turn.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from gateway.api.chunk import Delta, ReasoningDetail, ToolCall

Kind = Literal["thinking", "redacted", "text", "refusal", "tool"]


class Part(msgspec.Struct):
    kind: Kind
    index: int
    """Its place in the answer, from 0."""
    id: str = ""
    name: str = ""
    signature: str = ""
    """Of thinking that a model signed; all there is of redacted thinking."""
    utf8: bytearray = msgspec.field(default_factory=bytearray)
    logprobs: list[dict[str, Any]] = []
    """Of a text's tokens, where a surface wants them kept."""

    @property
    def text(self) -> str:
        """What it has so far; of a tool call its arguments in JSON."""
        return self.utf8.decode()

    @property
    def is_object(self) -> bool:
        """Whether its text is one whole JSON object, as a tool call's arguments are in the end."""
        try:
            msgspec.json.decode(self.utf8, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError):
            return False
        return True


class Step(NamedTuple):
    """What happens to a part: it begins, gets more text, or is complete."""

    what: Literal["open", "grow", "close"]
    part: Part
    text: str = ""


class Parts:
    """`row` has all parts so far, in order. Without `thinking`, what the model thinks is left out."""

    def __init__(self, thinking: bool = True) -> None:
        self.row: list[Part] = []
        self._thinking = thinking
        self._first = 0
        """Index of the first part that is not closed."""
        self._opened = False
        self._calls: dict[int, Part] = {}
        """By the upstream's index, the call that its next fragment belongs to."""

    def take(self, delta: Delta) -> list[Step]:
        """What a delta, or a whole message, leads to."""
        steps: list[Step] = []
        if self._thinking:
            steps += self._think(delta)
        if text := delta.text:
            steps += self._add(self._last("text"), text)
        if delta.refusal:
            steps += self._add(self._last("refusal"), delta.refusal)
        for place, call in enumerate(delta.tool_calls or ()):
            steps += self._add(self._call(call, place), call.function.text)
        return steps

    def end(self) -> list[Step]:
        """What is left to say once no more deltas come."""
        steps: list[Step] = []
        while self._first < len(self.row):
            steps += [*self._open(last=True), self._close()]
        return steps

    def _think(self, delta: Delta) -> list[Step]:
        thought = delta.thought
        steps = list(self._add(self._last("thinking"), thought)) if thought else []
        for detail in delta.reasoning_details or ():
            steps += self._sign(detail)
        return steps

    def _add(self, part: Part, text: str) -> Iterator[Step]:
        """More text for a part, which may be none but the part itself."""
        is_first = part.index == self._first
        if is_first and self._opened and text:
            yield Step("grow", part, text)
        part.utf8 += text.encode()
        if is_first:
            yield from self._open()
        while self._first < len(self.row) - 1 and _is_complete(self.row[self._first]):
            yield from self._open()
            yield self._close()
            yield from self._open()

    def _open(self, last: bool = False) -> Iterator[Step]:
        """Bring the first part into the open, with the text it has collected; a call only once its name is known."""
        part = self.row[self._first]
        if self._opened or (part.kind == "tool" and not part.name and not last):
            return
        self._opened = True
        yield Step("open", part)
        if part.utf8:
            yield Step("grow", part, part.text)

    def _close(self) -> Step:
        part = self.row[self._first]
        self._first += 1
        self._opened = False
        return Step("close", part)

    def _last(self, kind: Kind) -> Part:
        """The last part where it is of this kind, else a new one."""
        return self.row[-1] if self.row and self.row[-1].kind == kind else self._new(kind)

    def _new(self, kind: Kind) -> Part:
        self.row.append(Part(kind, len(self.row)))
        return self.row[-1]

    def _sign(self, detail: ReasoningDetail) -> Iterator[Step]:
        if detail.data:
            part = self._new("redacted")
            part.signature = detail.data
            yield from self._add(part, "")
        elif detail.signature:
            part = self._last("thinking")
            part.signature += detail.signature
            yield from self._add(part, "")

    def _call(self, call: ToolCall, place: int) -> Part:
        """The call that a fragment belongs to: that of its index, unless it brings another id."""
        index = place if call.index is None else call.index
        part = self._calls.get(index)
        if part is None or (call.id and part.id and call.id != part.id):
            part = self._calls[index] = self._new("tool")
        part.id = part.id or call.id or ""
        part.name = part.name or call.function.name or ""
        return part


def _is_complete(part: Part) -> bool:
    """Whether a part that has another behind it can get no more text: a tool call once its JSON is whole."""
    if part.kind != "tool":
        return True
    return bool(part.name) and part.utf8.endswith(b"}") and part.is_object
