"""A file of prices: CSV with a header, `[[price]]` tables in TOML, or a list of objects in JSON. One row, one version.

Every mistake is told with its line, and a file with one is not used at all. Columns, of which a row fills some:

- `model`, `upstream` (then it is a cost), `tier` (standard, batch or priority), `currency`, `effective_at` (a moment
  with its time zone, or a day, which begins at midnight UTC; from now on where it is not given);
- `org`, `team`, `key`: whose override it is; `factor`: times the list price;
- per million tokens `input_fresh`, `input_cached`, `input_cache_write` (default: input_fresh), `output_text`,
  `output_reasoning` (default: output_text); `per_request`, `per_image`, `per_cached_answer`; `device_hour`, of an
  upstream without a model;
- `ends`: true, and no price: the one before ends.
"""

import csv
import difflib
import io
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from billing.price_changes import Entry
from billing.prices import RATES, PriceTerms
from gateway.toml_places import places

AMOUNTS = (*RATES, "device_hour", "factor")
SCOPES = ("org", "team", "key")
COLUMNS = ("model", "upstream", "tier", "currency", "effective_at", *SCOPES, *AMOUNTS, "ends")


class Row(NamedTuple):
    """`scope`: of an override (kind, what the file calls it), to be found in the database."""

    line: int
    entry: Entry
    scope: tuple[str, str] | None


class Mistake(NamedTuple):
    line: int
    text: str


class PriceFileError(ValueError):
    """The message has every mistake, one a line."""

    def __init__(self, path: Path, mistakes: list[Mistake]) -> None:
        super().__init__("\n".join(f"{path}:{line}: {text}" for line, text in sorted(mistakes)))


def read_prices(path: Path, currency: str) -> list[Row]:
    """The rows of a file; `currency` where a row names none. Overrides have no scope_id yet. Raises PriceFileError."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise PriceFileError(path, [Mistake(1, f"write prices as {', '.join(_READERS)}, not as {path.suffix!r}")])
    try:
        text = path.read_text(encoding="utf-8-sig")
        found = list(reader(text))
    except OSError as error:
        raise PriceFileError(path, [Mistake(1, f"it cannot be read: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise PriceFileError(path, [Mistake(1, "it is not UTF-8 text")]) from None
    except _SyntaxError as error:
        raise PriceFileError(path, [error.mistake]) from None
    rows, mistakes = [], []
    for line, fields in found:
        try:
            rows.append(_row(line, fields, currency))
        except ValueError as error:
            mistakes.append(Mistake(line, str(error)))
    if not found:
        mistakes.append(Mistake(1, "there is no price in it"))
    if mistakes:
        raise PriceFileError(path, mistakes)
    return rows


def amount(name: str, given: object) -> Decimal:
    """Raises ValueError for what is no amount of money."""
    if not isinstance(given, str | int | Decimal) or isinstance(given, bool):
        raise ValueError(f"{name} is {given!r}; write an amount like 2.50")
    try:
        return Decimal(given)
    except InvalidOperation:
        raise ValueError(f"{name} is {given!r}; write an amount like 2.50") from None


def moment(given: object) -> datetime:
    """Raises ValueError for what is neither a moment with its time zone nor a day."""
    try:
        if isinstance(given, str):
            given = date.fromisoformat(given) if len(given) == 10 else datetime.fromisoformat(given)
    except ValueError:
        raise ValueError(f"{given!r} is not a moment; write it like 2026-12-01T00:00:00Z, or a day") from None
    if isinstance(given, datetime):
        if given.tzinfo is None:
            raise ValueError(f"{given.isoformat()} needs a time zone, like {given.isoformat()}Z")
        return given
    if isinstance(given, date):
        return datetime(given.year, given.month, given.day, tzinfo=UTC)
    raise ValueError(f"{given!r} is not a moment; write it like 2026-12-01T00:00:00Z, or a day")


class _SyntaxError(Exception):
    def __init__(self, line: int, text: str) -> None:
        self.mistake = Mistake(line, text)


Rows = Iterator[tuple[int, Mapping[str, Any]]]


def _csv(text: str) -> Rows:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    try:
        for name in reader.fieldnames or ():
            if name not in COLUMNS:
                raise _SyntaxError(1, _no_column(name))
        for row in reader:
            if None in row:
                count = len(reader.fieldnames or ())
                raise _SyntaxError(reader.line_num, f"it has more cells than the header's {count}")
            yield reader.line_num, {name: cell.strip() for name, cell in row.items() if cell and cell.strip()}
    except csv.Error as error:
        raise _SyntaxError(reader.line_num, f"it is no CSV: {error}") from None


def _toml(text: str) -> Rows:
    try:
        tables = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        place = str(error).rpartition("(at line ")[2].partition(",")[0]
        raise _SyntaxError(int(place) if place.isdecimal() else 1, f"it is no TOML: {error}") from None
    rows = tables.pop("price", [])
    if tables or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _SyntaxError(1, "write each price as a table [[price]]; nothing else belongs here")
    where = places(text)
    for index, row in enumerate(rows):
        yield where["price", index][0].line, row


def _json(text: str) -> Rows:
    decoder = json.JSONDecoder(parse_float=Decimal)
    at = _skipped(text, 0)
    if text[at : at + 1] != "[":
        raise _SyntaxError(1, "write a list of objects, one a price")
    at = _skipped(text, at + 1)
    while text[at : at + 1] != "]":
        line = text.count("\n", 0, at) + 1
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise _SyntaxError(error.lineno, f"it is no JSON: {error.msg}") from None
        if not isinstance(row, dict):
            raise _SyntaxError(line, "each price is an object")
        yield line, {name: value for name, value in row.items() if value is not None}
        at = _skipped(text, at)
        if text[at : at + 1] not in (",", "]"):
            raise _SyntaxError(text.count("\n", 0, at) + 1, "it is no JSON: a comma or the list's end is missing")
        if text[at] == ",":
            at = _skipped(text, at + 1)
    if _skipped(text, at + 1) != len(text):
        raise _SyntaxError(text.count("\n", 0, at) + 1, "there is something after the list")


def _skipped(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


_READERS: Mapping[str, Callable[[str], Rows]] = {".csv": _csv, ".toml": _toml, ".json": _json}


def _row(line: int, fields: Mapping[str, Any], currency: str) -> Row:
    for name in fields:
        if name not in COLUMNS:
            raise ValueError(_no_column(name))
    scopes = [(kind, _text(kind, fields[kind])) for kind in SCOPES if kind in fields]
    if "team" in fields and "org" in fields:  # the org says where the team is
        scopes = [("team", f"{fields['org']}/{fields['team']}")]
    if len(scopes) > 1:
        raise ValueError("an override is of one org, team or key")
    amounts = {name: amount(name, fields[name]) for name in AMOUNTS if name in fields}
    ends = fields.get("ends", False)
    if ends not in (False, True, "true", "false", ""):
        raise ValueError(f"ends is {ends!r}; write true or leave it out")
    if not amounts and ends not in (True, "true"):
        raise ValueError("it has no price; to end the one before, write ends = true")
    if amounts and ends in (True, "true"):
        raise ValueError("it ends, and has a price")
    words = {name: _text(name, fields[name]) for name in ("model", "upstream", "tier", "currency") if name in fields}
    terms = terms_of_row(words, amounts, scopes[0] if scopes else None, currency)
    at = moment(fields["effective_at"]) if "effective_at" in fields else None
    return Row(line, Entry(terms=terms, effective_at=at), scopes[0] if scopes else None)


def _no_column(name: str) -> str:
    near = difflib.get_close_matches(name, COLUMNS, 1)
    return f"there is no column {name!r}; " + (
        f"did you mean {near[0]}?" if near else f"there are {', '.join(COLUMNS)}"
    )


def terms_of_row(
    words: Mapping[str, str], amounts: Mapping[str, Decimal], scope: tuple[str, str] | None, currency: str
) -> PriceTerms:
    """Defaults filled in. Raises ValueError for what does not go together."""
    given: dict[str, Any] = {"model": "", "currency": currency, **words, **amounts}
    given["book"] = "cost" if words.get("upstream") else "sale"
    if scope is not None:
        given |= {"scope_kind": scope[0], "scope_id": scope[1]}
        given.setdefault("tier", "")
    for name, default in (("input_cache_write", "input_fresh"), ("output_reasoning", "output_text")):
        if name not in given and default in given:
            given[name] = given[default]
    try:
        return msgspec.convert(given, PriceTerms)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _text(name: str, given: object) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{name} is {given!r}; write a text")
    return given
