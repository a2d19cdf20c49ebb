"""A request's body as its top-level fields, each still raw JSON; those the gateway acts on are decoded by name."""

import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.call import storable
from gateway.errors import ApiError

Fields = dict[str, msgspec.Raw]

_CHOICES = ("n", "best_of", "n_cmpl")

_FIELDS = msgspec.json.Decoder(Fields)
_HALF_A_PAIR = re.compile(rb"\\u[dD][89abAB]..")
"""At the very end of a body: msgspec calls a first half with fewer than 6 bytes after it truncated."""


def read_fields(body: bytes) -> Fields:
    """Raises ApiError 400 where the body is not one JSON object in UTF-8."""
    try:
        body.decode()  # msgspec does not look inside raw strings
    except UnicodeDecodeError as error:
        raise ApiError(400, "invalid_utf8", f"The body is not valid UTF-8 at byte {error.start}.") from None
    try:
        return _FIELDS.decode(body)
    except msgspec.ValidationError:
        raise ApiError(400, "invalid_json", "The body must be a JSON object.") from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        halved = "surrogate" in reason or "hex escape" in reason  # msgspec's words in a value it decodes, or skips
        if halved or ("truncated" in reason and _HALF_A_PAIR.search(body[-12:])):
            reason = "a \\u escape is half of a surrogate pair, which is no character"
        elif "truncated" in reason:
            reason = f"it ends too early (byte {len(body)}) or a \\u escape is incomplete"
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {reason}.") from None
    except RecursionError:
        raise ApiError(400, "invalid_json", "The body's JSON is nested too deeply.") from None


def optional(fields: Mapping[str, msgspec.Raw], name: str, kind: Any, words: str) -> Any:
    """The decoded field, None when absent or null. Raises ApiError naming it; `words` say what it must be."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return _decoder(kind).decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        place = str(error).partition(" - at `$")[2].rstrip("`")
        detail = f" ({error})" if place else ""
        raise invalid(name, f"must be {words}{detail}") from None


@functools.cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind | None)


def required(fields: Mapping[str, msgspec.Raw], name: str, kind: Any, words: str) -> Any:
    value = optional(fields, name, kind, words)
    if value is None:
        raise ApiError(400, "missing_required_parameter", f"`{name}` is required: {words}.", param=name)
    return value


def invalid(name: str, reason: str) -> ApiError:
    """The error for a field that is not what it must be; `reason` follows the name in the sentence."""
    return ApiError(400, "invalid_value", f"`{name}` {reason}.", param=name)


def an_object(fields: Mapping[str, msgspec.Raw], name: str) -> dict[str, Any]:
    """The decoded object, empty when absent or null. Raises ApiError naming it."""
    value: dict[str, Any] | None = optional(fields, name, dict[str, Any], "an object")
    return value or {}


def is_given(fields: Mapping[str, msgspec.Raw], name: str) -> bool:
    """Whether the field is there and not null."""
    return bytes(fields.get(name, b"null")) != b"null"


def model_name(fields: Mapping[str, msgspec.Raw]) -> str:
    name: str = required(fields, "model", str, "a string")
    return name


def is_streamed(fields: Mapping[str, msgspec.Raw]) -> bool:
    return optional(fields, "stream", bool, "true or false") or False


def choices(fields: Mapping[str, msgspec.Raw], name: str = "n") -> int:
    """How many answers are asked for; 1 where the caller does not say."""
    value: int | None = optional(fields, name, int, "an integer")
    if value is not None and value < 1:
        raise invalid(name, f"must be at least 1, not {value}")
    return value or 1


def answers(fields: Mapping[str, msgspec.Raw]) -> int:
    """How many answers are written, and paid, for one prompt: by whatever name an upstream takes the number."""
    given = [choices(fields, name) for name in _CHOICES if name in fields]
    return max(given) if given else 1


def user_tags(user: str | None) -> dict[str, str]:
    """`user` is a tag for the reader of the ledger; who pays is decided by the key alone."""
    return {"user": storable(user)} if user else {}


def encoded(value: Any) -> msgspec.Raw:
    """A value as the raw JSON of a field."""
    return msgspec.Raw(msgspec.json.encode(value))
