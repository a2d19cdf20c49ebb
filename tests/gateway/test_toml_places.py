"""Where keys and values stand: every one that the standard library's parser finds is found at its place."""

import tomllib
from typing import Any

import pytest

from gateway.toml_places import Path, Place, closest, places

TEXTS = {
    "plain": 'a = 1\n[b]\nc = "x" # not = this\n[b.d]\ne = true\n',
    "dotted": "a.b.c = 1\n[x.\"y.z\".'w']\nv = 2\n",
    "inline": "a = { b = { c = [1, 2, { d = \"}\" }] }, e = '#' }\n",
    "arrays": 'a = [\n  "x", # one\n  [ 1,\n    2 ],\n]\nb = []\n',
    "tables in arrays": '[[m.u]]\nn = 1\n[m.u.price]\np = "2"\n[[m.u]]\nn = 3\n',
    "strings": 'a = """\n"quoted" [x]\n\\"""" \nb = \'\'\'\n[no]\n\'\'\'\nc = "\\" # still"\nd = 2026-01-01 10:00:00\n',
    "windows": "a = 1\r\n\r\n[b]\r\nc = { d = 2 }\r\n",
    "tabs and blanks": '\t[ a . b ]\n\t"c d" = \t0.5\n',
    "no end of line": "[a]\nb = 1",
    "letters": '"größe" = "ü"\n"größe 2" = { "ü" = 1 }\n',
}


def leaves(value: Any, path: Path = ()) -> dict[Path, Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {path: value} if not isinstance(value, dict | list) else {}
    for key, item in items:
        found |= leaves(item, (*path, key))
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_every_value_is_found_where_it_stands(name: str) -> None:
    text = TEXTS[name]
    found, lines = places(text), text.split("\n")
    for path, value in leaves(tomllib.loads(text)).items():
        key, place = found[path]
        written = lines[place.line - 1][place.column - 1 :]
        shown = {str: ('"', "'"), bool: ("true", "false")}.get(type(value), tuple("0123456789"))
        assert written.startswith(shown), (path, written)
        if isinstance(path[-1], str):
            assert path[-1].split(" ")[0] in lines[key.line - 1] or "." in lines[key.line - 1]


def test_places_are_exact() -> None:
    found = places(TEXTS["tables in arrays"])
    assert found["m", "u", 0, "n"] == (Place(2, 1), Place(2, 5))
    assert found["m", "u", 0, "price", "p"] == (Place(4, 1), Place(4, 5))
    assert found["m", "u", 1] == (Place(5, 1), Place(5, 1))
    assert found["m", "u", 1, "n"] == (Place(6, 1), Place(6, 5))
    assert places(TEXTS["inline"])["a", "b", "c", 2, "d"] == (Place(1, 26), Place(1, 30))
    assert places(TEXTS["arrays"])["a", 1, 1][1] == Place(4, 5)


def test_what_is_not_there_is_shown_at_the_table_around_it() -> None:
    found = places("[a.b]\nc = 1\n")
    assert closest(found, ("a", "b", "c"), key=False) == Place(2, 5)
    assert closest(found, ("a", "b", "missing"), key=False) == Place(1, 1)
    assert closest(found, ("nothing",), key=False) is None
