"""A model file's settings, read with the types expected of them; what nobody has read can be refused by name."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from engine.loader.checkpoint import ModelFileError


class Fields:
    """`where` starts every message: the file, and the part of it."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self._values = where, values
        self._known: set[str] = set()

    def raw(self, name: str) -> Any:
        """The value as stored; None where the field is missing or null."""
        self._known.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self._values

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise self._unlike(name, value, "one whole number")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._unlike(name, value, "one number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self._unlike(name, value, "a number above 0")
        return value

    def nonzero(self, name: str, default: float | None = None) -> float | None:
        """A number above 0. Null and 0 say that there is none, `default` counts where the field is left out."""
        if not self.has(name):
            return default
        return self.positive(name) if self.raw(name) else None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self._unlike(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self._unlike(name, value, "a text")
        return value

    def group(self, name: str) -> "Fields | None":
        """The fields of an object within this one; None where it is missing, null or empty."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            raise self._unlike(name, value, "an object")
        return Fields(f"{self.where}: {name}", value) if value else None

    def check_all_known(self, harmless: Collection[str] = ()) -> None:
        """Refuse a field that has not been read, unless it is empty, zero, false or known to change no result."""
        for name in sorted(self._values.keys() - self._known - set(harmless)):
            if self._values[name]:
                raise ModelFileError(
                    f"{self.where}: field {name} is {_short(self._values[name])}, which Farthing does not know: the "
                    "model could come out wrong. Remove the field if it changes no result"
                )

    def _required(self, name: str, default: Any) -> Any:
        value = self.raw(name)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(f"{self.where}: field {name} is missing")
        return value

    def _unlike(self, name: str, value: Any, expected: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: field {name} is {_short(value)}, expected {expected}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
