"""Reads one tool call, `{"name": …, "arguments": {…}}`, from text that comes in pieces of any size."""

import json
from typing import Any

from engine.pieces import CallDelta

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", *ARGUMENTS, "type", "id")
"""All that a call may have; another key tells early that it is none."""
SPACE = " \t\r\n"


class CallReader:
    """Hands the arguments on as they come where the name stands before them, else the whole call at its end.

    The arguments are passed on as the model writes them, which is what their parts add up to. A text that is no such
    object, or calls a function that nobody declared, is no call: `broken` is set and `text` is all of it.
    """

    def __init__(self, number: int, id: str, names: frozenset[str]) -> None:
        self._number, self._id, self._names = number, id, names
        self.text = ""
        """What has been read so far."""
        self.done = False
        self.broken = False
        self.said = False
        """Whether any part of the call has been returned."""
        self._depth = 0
        self._in_string = self._escaped = False
        self._start = 0
        """Where the current key or value of the outermost object begins."""
        self._wants = "object"
        self._key = ""
        self._values: dict[str, tuple[int, int]] = {}
        """Place in the text of each value of the outermost object."""
        self._streaming_from: int | None = None

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        """Parts of the call, and the text that comes after its end. Not to be used any more once done or broken."""
        first = len(self.text)
        self.text += text
        for at in range(first, len(self.text)):
            self._read(self.text[at], at)
            if self.broken or self.done:
                rest, self.text = self.text[at + 1 :], self.text[: at + 1]
                return self._parts(), rest
        return self._parts(), ""

    def _read(self, character: str, at: int) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 1:
                    self._end_string(at + 1)
        elif self._depth > 1:
            self._in_string = character == '"'
            if character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 1:
                    self._end_value(at + 1)
        elif character not in SPACE:
            self._read_outer(character, at)
        elif self._wants == "scalar":
            self._end_value(at)

    def _read_outer(self, character: str, at: int) -> None:
        """A character of the outermost object's own structure."""
        wants = self._wants
        if wants == "object" and character == "{":
            self._depth, self._wants = 1, "first key"
        elif wants in ("first key", "key") and character == '"':
            self._start, self._in_string, self._wants = at, True, "colon"
        elif wants == "colon" and character == ":":
            self._wants = "value"
        elif wants == "value" and character not in ",:}]":
            self._start = at
            self._in_string = character == '"'
            if character in "{[":
                self._depth = 2
                if character == "{" and self._key in ARGUMENTS and self._name() is not None:
                    self._streaming_from = self._start
            elif not self._in_string:
                self._wants = "scalar"
        elif wants in ("comma", "scalar") and character in ",}":
            if wants == "scalar":
                self._end_value(at)
            self._wants = "key"
            if character == "}":
                self._depth, self.done = 0, True
        elif wants == "first key" and character == "}":
            self._depth, self.done = 0, True
        elif wants != "scalar":
            self.broken = True

    def _end_string(self, end: int) -> None:
        if self._wants == "colon":
            key = _json(self.text[self._start : end])
            self._key = key if isinstance(key, str) else ""
            self.broken = self._key not in KEYS
        else:
            self._end_value(end)

    def _end_value(self, end: int) -> None:
        self._values.setdefault(self._key, (self._start, end))
        self.broken = self._key == "name" and self._name() is None
        self._wants = "comma"

    def _parts(self) -> list[CallDelta]:
        if self._streaming_from is not None:
            start = self._streaming_from
            end = next((self._values[key][1] for key in ARGUMENTS if key in self._values), len(self.text))
            part, self._streaming_from = self.text[start:end], max(start, end)
            if not part:
                return []
            return [self._delta(part)]
        if self.done and not self.said:
            arguments = self._arguments()
            if arguments is not None and self._name() is not None:
                return [self._delta(arguments)]
            self.broken = True
        return []

    def _delta(self, arguments: str) -> CallDelta:
        if self.said:
            return CallDelta(self._number, arguments=arguments)
        self.said = True
        return CallDelta(self._number, self._id, self._name(), arguments)

    def _name(self) -> str | None:
        name = self._value("name")
        return name if isinstance(name, str) and name in self._names else None

    def _arguments(self) -> str | None:
        """The arguments as the text of a JSON object; those of a call that has none are empty."""
        place = next((self._values[key] for key in ARGUMENTS if key in self._values), None)
        if place is None:
            return "{}"
        text = self.text[place[0] : place[1]]
        value = _json(text)
        if value is None:
            return "{}" if text == "null" else None
        if isinstance(value, str):  # some models write the object as a string
            text, value = value, _json(value)
        return text if isinstance(value, dict) and _is_unicode(text) else None

    def _value(self, key: str) -> Any:
        place = self._values.get(key)
        return None if place is None else _json(self.text[place[0] : place[1]])


def _json(text: str) -> Any:
    """The value; None when the text is not JSON."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
