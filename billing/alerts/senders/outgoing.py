"""A request to be sent, and what an answer must look like to count as taken."""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

JSON = {"content-type": "application/json; charset=utf-8"}


class RefusedError(Exception):
    """The receiver did not take the message; the reason is its own words, cut short."""


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """One POST. `check` gets the body of a 2xx answer and raises RefusedError where that says no."""

    url: str
    headers: dict[str, str]
    body: bytes
    check: Callable[[bytes], None]


def is_url(address: str) -> bool:
    """Whether it can be taken apart. Python's own errors of what cannot be would show it."""
    try:
        parts = urlsplit(address)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0) and address.isprintable()
    except ValueError:
        return False


def nothing_to_check(_: bytes) -> None:
    """Of a receiver whose status code says it all."""


def code_is_zero(name: str, reason: str) -> Callable[[bytes], None]:
    """For the services that answer 200 whatever happens, and say in JSON under `name` whether they took it (0)."""

    def check(body: bytes) -> None:
        try:
            answer: Any = msgspec.json.decode(body)
            code = answer.get(name)
        except (msgspec.DecodeError, AttributeError, UnicodeDecodeError):
            raise RefusedError("its answer is not what the service answers; is the address right?") from None
        if code != 0:
            raise RefusedError(f"{name} {code}: {str(answer.get(reason))[:200]}")

    return check


def harmless(text: str) -> str:
    """Text for a service that reads some Markdown: a tag's value, which any caller may set, makes no link and calls
    nobody. Escapes are not what these services share, so brackets become their wide forms.
    """
    return text.translate(_WIDE)


_WIDE = str.maketrans("<>[]", "＜＞［］")
