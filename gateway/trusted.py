"""Requests that the gateway makes of itself, in process: lines of a batch, on behalf of the key that made it.

They enter through the ASGI application like any other, so limits, budgets, routes and the ledger apply to them. What
vouches for them is an object in the ASGI scope: a server makes the scope, and puts nothing but strings, bytes and
numbers from the network into it, so that nobody outside the process can send one.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from litestar.types import ASGIApp, Message, Scope

from billing.people import Principal
from billing.prices import Tier

SCOPE_ENTRY = "farthing.trusted"


@dataclass(frozen=True, slots=True)
class Trusted:
    """Who is asking (checked already), and what sets this request apart from one that came over a socket."""

    principal: Principal
    tier: Tier
    """Which price of the book it is billed at."""
    priority: int
    """For upstreams of kind engine: larger runs later."""
    tags: Mapping[str, str]
    """Added to the operation's own."""

    @staticmethod
    def of(scope: Mapping[str, Any]) -> "Trusted | None":
        """What vouches for the request of this scope; None for one that came over a socket."""
        entry = scope.get(SCOPE_ENTRY)
        return entry if isinstance(entry, Trusted) else None


@dataclass(slots=True)
class Answer:
    """What the application answered. `complete` is False while it has not, or where it was cut off."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False


async def ask(app: ASGIApp, path: str, body: bytes, trusted: Trusted, answer: Answer) -> None:
    """POST `body` (JSON) to the application's own `path`; fill `answer`, which is good also where this is cancelled."""
    await app(_scope(path, len(body), trusted), _Receive(body), _Send(answer))


def _scope(path: str, length: int, trusted: Trusted) -> Scope:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
        "extensions": {},
        SCOPE_ENTRY: trusted,
    }
    return cast(Scope, scope)


class _Receive:
    """The body in one piece, then silence: this caller does not leave."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> Any:
        body, self._body = self._body, None
        if body is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body, "more_body": False}


class _Send:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._answer.status = message["status"]
            self._answer.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            self._answer.body += message.get("body", b"")
            self._answer.complete = not message.get("more_body", False)
