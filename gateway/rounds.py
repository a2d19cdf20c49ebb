"""One timer that looks at many things in turn: hardly any of them is ever overdue, and a timer for each costs more."""

import asyncio
import time
from typing import Generic, Protocol, TypeVar


class Watched(Protocol):
    def look(self, now: float) -> None:
        """Called every round; `now` on the monotonic clock."""
        ...


T = TypeVar("T", bound=Watched)


class Rounds(Generic[T]):
    """Looks at each of `members` every `seconds`, as long as there are any: what is due is noticed so much too late."""

    def __init__(self, seconds: float) -> None:
        self.members: set[T] = set()
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def add(self, member: T) -> None:
        self.members.add(member)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)

    def discard(self, member: T) -> None:
        self.members.discard(member)

    def _look(self) -> None:
        """The next round is set first: one member that fails must not end the others' deadlines for ever."""
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look) if self.members else None
        now = time.monotonic()
        for member in tuple(self.members):
            member.look(now)
