"""Which JSON Schemas guided decoding takes: those of which every keyword is enforced or says nothing about the answer.

The grammar library refuses the keywords that it knows but lacks and passes over those it never heard of. A schema with
a misspelt keyword would so be enforced in part; it is refused here instead, by the keyword's name.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

# fmt: off
ENFORCED = frozenset(
    {
        "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum",
        "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
        "minLength", "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties",
        "prefixItems", "properties", "required", "type",
    }
)
ANNOTATIONS = frozenset(
    {
        "$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "default",
        "definitions", "deprecated", "description", "examples", "id", "readOnly", "title", "writeOnly",
    }
)
# fmt: on
"""Say nothing about which JSON is valid, or only name a schema."""

NAMED = ("$defs", "definitions", "patternProperties", "properties")
"""Hold an object of schemas by name."""
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("additionalItems", "additionalProperties", "items")

MAX_BYTES = 1 << 18
MAX_DEPTH = 100
"""Schemas inside schemas."""
MAX_NAMES = 2000
"""Properties in all. Compiling them takes time that grows with the square of their number: 1 s for these."""


class SchemaError(ValueError):
    """The schema can't be enforced; the message names the keyword and where it stands."""


def check(schema: Any) -> str:
    """The schema as compact JSON; raises SchemaError unless each of its keywords will be enforced."""
    level = [("the schema", schema)]
    names = 0
    for _ in range(MAX_DEPTH):
        names += sum(_names(outer) for _, outer in level)
        level = [inner for where, outer in level for inner in _subschemas(where, outer)]
        if not level:
            break
    else:
        raise SchemaError(f"the schema has schemas nested more than {MAX_DEPTH} levels deep: use $ref, or flatten it")
    if names > MAX_NAMES:
        raise SchemaError(f"the schema names {names} properties; the most is {MAX_NAMES}: make it smaller")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except (ValueError, RecursionError) as error:
        raise SchemaError("the schema is not valid JSON") from error
    if size > MAX_BYTES:
        raise SchemaError(f"the schema has {size} bytes; the most is {MAX_BYTES}: make it smaller")
    return text


def _names(schema: Any) -> int:
    lists = (
        (schema.get(key) for key in ("properties", "patternProperties", "required"))
        if isinstance(schema, Mapping)
        else ()
    )
    return sum(len(names) for names in lists if isinstance(names, Mapping | list))


def _subschemas(where: str, schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside, each with its place, after checking the keywords of this one."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{where} must be an object or true or false")
    for keyword, value in schema.items():
        if keyword not in ENFORCED and keyword not in ANNOTATIONS:
            name = keyword if len(keyword) <= 60 else f"{keyword[:60]}…"
            raise SchemaError(f"{where} has the keyword {name!r}, which is not supported: leave it out")
        if keyword in NAMED:
            if not isinstance(value, Mapping):
                raise SchemaError(f"{keyword} of {where} must be an object of schemas")
            for name, inner in value.items():
                yield _inside(where, keyword, name), inner
        elif keyword in LISTED or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise SchemaError(f"{keyword} of {where} must be a list of schemas")
            for i, inner in enumerate(value):
                yield _inside(where, keyword, str(i)), inner
        elif keyword in SINGLE:
            yield _inside(where, keyword), value


def _inside(where: str, *steps: str) -> str:
    """Place of an inner schema as a JSON pointer, cut where it gets too long to read."""
    path = "/".join(["#" if where == "the schema" else where, *steps])
    return path if len(path) <= 200 else f"{path[:200]}…"
