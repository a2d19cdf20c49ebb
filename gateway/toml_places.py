"""Where in a TOML text each key and value stands: the standard library's parser does not tell.

The text has been parsed before, so it is valid: what is left is to follow its keys, brackets and strings.
"""

import re
import tomllib
from typing import NamedTuple

Path = tuple[str | int, ...]
"""Keys and list indexes from the top, as pydantic names places."""


class Place(NamedTuple):
    """Both count from 1; columns count characters."""

    line: int
    column: int


_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(r'"""(?:\\.|(?!""").)*"{3,5}|\'\'\'(?:(?!\'\'\').)*\'{3,5}|"(?:\\.|[^"\\])*"|\'[^\']*\'', re.S)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_VALUE = re.compile(r"[^,\]}#\r\n]+")


def places(text: str) -> dict[Path, tuple[Place, Place]]:
    """By path, where its key starts and where its value does (of a table: its header, or its first key)."""
    return _Reader(text).read()


def closest(found: dict[Path, tuple[Place, Place]], path: Path, *, key: bool) -> Place | None:
    """The place of `path`, of its key or its value, or of the nearest table around it; None at the top."""
    while path and path not in found:
        path, key = path[:-1], True
    return found[path][0 if key else 1] if path else None


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._found: dict[Path, tuple[Place, Place]] = {}
        self._lengths: dict[Path, int] = {}
        """Of arrays of tables."""

    def read(self) -> dict[Path, tuple[Place, Place]]:
        table: Path = ()
        while self._skip() < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
        return self._found

    def _skip(self) -> int:
        match = _BLANK.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._at

    def _place(self) -> Place:
        line_start = self._text.rfind("\n", 0, self._at) + 1
        return Place(self._text.count("\n", 0, self._at) + 1, self._at - line_start + 1)

    def _note(self, path: Path, key: Place, value: Place) -> None:
        self._found.setdefault(path, (key, value))

    def _header(self) -> Path:
        start = self._place()
        array = self._text.startswith("[[", self._at)
        self._at += 2 if array else 1
        path = self._resolved(self._key(), start)
        if array:
            index = self._lengths.get(path, 0)
            self._lengths[path] = index + 1
            self._note(path, start, start)
            path = (*path, index)
        self._at += 2 if array else 1
        self._found[path] = (start, start)
        return path

    def _resolved(self, keys: list[str], start: Place) -> Path:
        """The path of a header's keys: an array of tables on the way means its last table."""
        path: Path = ()
        for position, key in enumerate(keys):
            path = (*path, key)
            self._note(path, start, start)
            if position < len(keys) - 1 and path in self._lengths:
                path = (*path, self._lengths[path] - 1)
        return path

    def _key(self) -> list[str]:
        """A key, dotted or not; stands behind it and the blanks after it."""
        parts = []
        while True:
            self._skip()
            quoted = self._text[self._at] in "\"'"
            match = (_STRING if quoted else _BARE_KEY).match(self._text, self._at)
            assert match is not None
            parts.append(_unquoted(match[0]) if quoted else match[0])
            self._at = match.end()
            self._skip()
            if self._text[self._at] != ".":
                return parts
            self._at += 1

    def _pair(self, table: Path) -> None:
        start = self._place()
        keys = self._key()
        self._at += 1  # the =
        self._skip()
        value = self._place()
        path = table
        for key in keys:
            path = (*path, key)
            self._note(path, start, value)
        self._value(path)

    def _value(self, path: Path) -> None:
        first = self._text[self._at]
        if first == "{":
            self._items(path, "}")
        elif first == "[":
            self._items(path, "]")
        else:
            match = (_STRING if first in "\"'" else _BARE_VALUE).match(self._text, self._at)
            assert match is not None
            self._at = match.end()

    def _items(self, path: Path, end: str) -> None:
        self._at += 1
        index = 0
        while self._skip() < len(self._text) and self._text[self._at] != end:
            if end == "}":
                self._pair(path)
            else:
                place = self._place()
                self._note((*path, index), place, place)
                self._value((*path, index))
                index += 1
            if self._text[self._skip()] == ",":
                self._at += 1
        self._at += 1


def _unquoted(key: str) -> str:
    return next(iter(tomllib.loads(f"{key} = 0")))
