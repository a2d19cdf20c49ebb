"""Reading the configuration's file: every mistake gets a sentence with its line, its column and what would be right."""

import difflib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.settings import ContradictionError, Settings
from gateway.toml_places import Path as KeyPath
from gateway.toml_places import Place, closest, places

ENVIRONMENT = ("database_url", "admin_key_hash", "data_dir")
"""Come from FARTHING_* variables alone, never from the file."""
SECTIONS = ("router", "limits", "oidc", "roles", "upstreams", "models")
_SYNTAX_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_MISSING_COMMA = ("Unclosed array", "Unclosed inline table")


class Mistake(NamedTuple):
    """`place` is None where it is about the file or the environment as a whole."""

    place: Place | None
    text: str


class ConfigurationError(ValueError):
    """The configuration cannot be used; the message lists every reason, one a line."""

    def __init__(self, path: Path, mistakes: list[Mistake]) -> None:
        self.mistakes = sorted(mistakes, key=lambda mistake: mistake.place or Place(0, 0))
        super().__init__("\n".join(_line(path, mistake) for mistake in self.mistakes))


def load(path: Path, **values: Any) -> Settings:
    """The settings in `path`, its environment and `values` (which win). Raises ConfigurationError."""
    text = _text(path)
    tables = _tables(path, text)
    try:
        return Settings(**{**tables, **values})
    except ValidationError as error:
        found = places(text)
        raise ConfigurationError(path, list(_mistakes(error, tables, found))) from None


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigurationError(path, [Mistake(None, f"it cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        what = f"it is not UTF-8 text (byte {error.start}): save it as UTF-8"
        raise ConfigurationError(path, [Mistake(None, what)]) from error


def _tables(path: Path, text: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(text)
    except RecursionError as error:
        raise ConfigurationError(path, [Mistake(None, "its tables or lists are nested too deeply")]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(path, [_syntax(str(error), text)]) from error
    found = places(text)
    wrong = [name for name in SECTIONS if not isinstance(tables.get(name, {}), dict)]
    wrong += [name for name in ENVIRONMENT if name in tables]
    if wrong:  # before a variable such as FARTHING_ROLES__SMALL takes the place of what is no table
        raise ConfigurationError(path, [Mistake(found[name,][0], _misplaced(name, tables[name])) for name in wrong])
    return tables


def _misplaced(name: str, value: Any) -> str:
    if name in ENVIRONMENT:
        return f"`{name}` is not for the file: set the environment variable FARTHING_{name.upper()}"
    return f"`{name}` must be a table, like [{name}], not {value!r}"


def _syntax(message: str, text: str) -> Mistake:
    match = _SYNTAX_PLACE.search(message)
    words = _SYNTAX_PLACE.sub("", message)
    lines = text.splitlines() or [""]
    if words in _MISSING_COMMA:
        words += ": is a comma missing before this?"
    if match is not None and match[1]:
        place = Place(int(match[1]), int(match[2]))
        if lines[place.line - 1][: place.column - 1].rstrip().endswith(","):
            words += ": is the comma before this one too many?"
        return Mistake(place, f"this is not valid TOML: {words}")
    return Mistake(Place(len(lines), len(lines[-1]) + 1), f"this is not valid TOML: {words}, and here the file ends")


def _mistakes(
    error: ValidationError, tables: dict[str, Any], found: dict[KeyPath, tuple[Place, Place]]
) -> Iterator[Mistake]:
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ContradictionError):
            for path, text in cause.problems:
                yield Mistake(closest(found, path, key=False), f"{_name(path)}: {text}")
            continue
        path = _path_in_file(problem["loc"], tables)
        unknown = problem["type"] == "extra_forbidden"
        yield Mistake(closest(found, path, key=unknown), _explain(problem, path))


def _path_in_file(location: tuple[str | int, ...], tables: Any) -> KeyPath:
    """As much of pydantic's location as stands in the file: an item given as a bare string has nothing below it."""
    path: list[str | int] = []
    value = tables
    for part in location:
        if isinstance(value, dict):
            value = value.get(str(part))
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            break
        path.append(part)
    return tuple(path)


def _explain(problem: ErrorDetails, path: KeyPath) -> str:
    name = _name(path)
    if problem["type"] == "missing" and name in ENVIRONMENT:
        return f"the environment variable FARTHING_{name.upper()} is not set"
    if problem["type"] == "missing":
        return f"{name} is missing"
    if problem["type"] == "extra_forbidden":
        known = _fields_of(path[:-1])
        near = difflib.get_close_matches(str(path[-1]), known, 1)
        advice = f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(known)}"
        return f"{name} is not a setting; {advice}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message


def _fields_of(path: KeyPath) -> list[str]:
    """Names of the settings that can stand in the table at `path`."""
    section: type[BaseModel] = Settings
    parts = iter(path)
    for part in parts:
        annotation = section.model_fields[str(part)].annotation
        if get_origin(annotation) in (dict, tuple):
            next(parts)  # a name or an index
        section = _section_in(annotation)
    return [name for name in section.model_fields if section is not Settings or name not in ENVIRONMENT]


def _section_in(annotation: Any) -> type[BaseModel]:
    """The section that a field's type names, optional, in a list or by name."""
    while not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        annotation = next(inner for inner in get_args(annotation) if inner not in (str, NoneType, Ellipsis))
    return annotation


def _name(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def _line(path: Path, mistake: Mistake) -> str:
    where = "" if mistake.place is None else f":{mistake.place.line}:{mistake.place.column}"
    return f"{path}{where}: {mistake.text}"
