"""Which requests are the very same: the key of an answer in the response cache.

SHA-256 over fields that each carry their name and their length, so that no two requests read alike by chance. Bodies
count as JSON values, not as bytes: names in any order and characters in any spelling are the same. Numbers are as they
were written (1 and 1.0 may mean different things to an upstream), and of a name that is there twice both values count.
Only a body of very many values counts as its bytes: reading them one by one would hold up everybody else.
"""

import hashlib
import json
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import msgspec

from billing.people import Principal
from gateway.call import Call
from gateway.settings import SharedBy

_NO_DIFFERENCE = frozenset({"metadata", "safety_identifier", "stream", "user"})
"""Fields of a body that say who asks or how the answer travels; `stream` counts by itself."""
_OF_STREAMS = "stream_options"
MOST_VALUES = 10_000
"""Read one by one, which takes some 3 us each; counted by commas, those in texts too."""


def answer_key(call: Call, model: str, principal: Principal, shared_by: SharedBy) -> bytes:
    """The key of the call's answer by `model`, among those that share it.

    Raises ValueError where a field is no JSON, RecursionError where it is nested too deeply.
    """
    digest = hashlib.sha256()
    for name, value in _fields(call, model, principal, shared_by):
        for part in (name.encode("utf-8", "surrogatepass"), value):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.digest()


def _fields(call: Call, model: str, principal: Principal, shared_by: SharedBy) -> Iterator[tuple[str, bytes]]:
    yield "api", call.api.encode()
    yield "model", model.encode()
    yield "org", principal.org_id.bytes
    if shared_by == "team" and principal.team_id is not None:
        yield "team", principal.team_id.bytes
    elif shared_by != "org":
        yield "key", principal.key_id.bytes
    yield "stream", b"1" if call.stream else b"0"
    if call.betas is not None:
        yield "betas", call.betas.encode("utf-8", "surrogatepass")
    body = call.fields if call.original is None else call.original
    repeated = call.api == "responses"  # the answer says again what the request said
    few = sum(bytes(raw).count(b",") for raw in body.values()) + len(body) <= MOST_VALUES
    for name in sorted(body):
        same = name in _NO_DIFFERENCE and not (repeated and name != "stream")
        if not (same or (name == _OF_STREAMS and not call.stream)):
            yield (f"body {name}", canonical(body[name])) if few else (f"bytes {name}", bytes(body[name]))


def canonical(raw: msgspec.Raw | bytes) -> bytes:
    """Equal for equal JSON values, and for no others."""
    return json.dumps(_DECODER.decode(bytes(raw).decode()), separators=(",", ":")).encode()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {"object": sorted(pairs, key=itemgetter(0))}


def _number(digits: str) -> dict[str, str]:
    return {"number": digits}


# Objects and numbers become objects of one name, so that they are never taken for arrays and strings.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_number, parse_float=_number, parse_constant=_number, strict=False
)
