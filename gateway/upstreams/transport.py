"""The relay's one small interface to HTTP: what it asks of a client, and what may go wrong. `client` implements it."""

from collections.abc import Mapping
from typing import Protocol


class UnreachableError(Exception):
    """No connection could be made: nothing was sent, so trying again is always safe."""


class BrokenError(Exception):
    """The connection failed after something was sent: no answer, or half of one."""


class SilentError(BrokenError):
    """The upstream took longer than it may."""


class Reply(Protocol):
    """An answer whose headers are here. Close it, or its connection is never used again."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]:
        """By their names in lower case."""
        ...

    @property
    def at_hand(self) -> bool:
        """Whether some of the body has come, so that `chunk` does not wait."""
        ...

    async def chunk(self) -> bytes:
        """The bytes of the body that have come, at least one; b"" at its end. Raises BrokenError."""
        ...

    async def read(self) -> bytes:
        """The rest of the body, as far as it may be kept in memory. Raises BrokenError."""
        ...

    async def drain(self, seconds: float) -> None:
        """Read what is left for at most so long: a connection that was read to its end can be used again."""
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    async def send(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> Reply:
        """Send one request, return when the answer's headers are here. Raises UnreachableError or BrokenError."""
        ...

    async def close(self) -> None: ...
