"""JSON with half of a surrogate pair in it: no character, yet some upstreams send one where they cut an emoji in two.

Who relays an answer as it came relays that too, since a caller may put the halves together. Who has to read it reads
U+FFFD in its place.
"""

import re
from typing import TypeVar

import msgspec

T = TypeVar("T")

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""Any escape, a whole pair as one; the group is half of a pair."""


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body decoded, whatever halves it has. Raises msgspec's errors, and RecursionError."""
    try:
        return decoder.decode(body)
    except msgspec.DecodeError:
        mended = _ESCAPE.sub(_mend, body)
        if mended == body:
            raise
        return decoder.decode(mended)


def _mend(escape: re.Match[bytes]) -> bytes:
    return escape[0] if escape[1] is None else rb"\ufffd"
