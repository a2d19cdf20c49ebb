"""One model on one upstream, with what is known of it while requests run: how busy, how quick, whether it works."""

import time

import msgspec

from gateway.call import Call
from gateway.settings import TargetSettings
from gateway.upstreams.affinity import BlockFollower, SentChunks
from gateway.upstreams.balance import View
from gateway.upstreams.breaker import Breaker
from gateway.upstreams.upstream import Upstream

SMOOTHING = 0.2
"""Weight of the latest time to the first byte in the average."""
LONGEST_REST = 60.0
"""Seconds for which a Retry-After keeps requests away that can go elsewhere."""


class Target:
    """Shared by all requests for `model`. `name` is what the upstream calls it."""

    __slots__ = (
        "_resting_until",
        "_seconds",
        "breaker",
        "follower",
        "in_flight",
        "is_away",
        "model",
        "name",
        "sent",
        "settings",
        "upstream",
    )

    def __init__(self, model: str, settings: TargetSettings, upstream: Upstream) -> None:
        self.model = model
        self.name = settings.upstream_model or model
        self.settings = settings
        self.upstream = upstream
        self.breaker = Breaker()
        self.in_flight = 0
        self.is_away = False
        """The last thing it did was to refuse a connection, or to say that it is loading: it is being restarted."""
        self.follower = BlockFollower(upstream, self.name) if upstream.is_engine else None
        self.sent = SentChunks()
        self._seconds: dict[bool, float] = {}
        """Average time to the first byte, of streams and of whole answers."""
        self._resting_until = 0.0

    def ready(self, now: float) -> bool:
        """Whether a request can go there now."""
        return self.breaker.ready(now) and not self.is_full

    @property
    def is_full(self) -> bool:
        most = self.settings.max_concurrent
        return most is not None and self.in_flight >= most

    def rests(self, now: float) -> bool:
        """Whether it asked to be left alone for now."""
        return now < self._resting_until

    def rest(self, seconds: float) -> None:
        self._resting_until = max(self._resting_until, time.monotonic() + min(seconds, LONGEST_REST))

    def view(self, call: Call, matched: int) -> View:
        seconds = self._seconds.get(call.stream, self._seconds.get(not call.stream))
        return View(self.settings.weight, self.in_flight, seconds, matched)

    def enter(self) -> None:
        """A request goes there; it ends with `leave`."""
        self.breaker.start()
        self.in_flight += 1
        self.upstream.enter()

    def leave(self) -> None:
        self.in_flight -= 1
        self.upstream.leave()

    def close(self) -> None:
        if self.follower is not None:
            self.follower.stop()

    def answered(self, stream: bool, seconds: float) -> None:
        """It began to answer after so long."""
        self.works()
        known = self._seconds.get(stream)
        self._seconds[stream] = seconds if known is None else known + SMOOTHING * (seconds - known)

    def works(self) -> None:
        """It answered, or refused for a reason of the caller's."""
        self.breaker.passed(time.monotonic())
        self.is_away = False

    def failed(self, *, away: bool = False) -> None:
        self.breaker.failed(time.monotonic(), away=away)
        self.is_away = away


class Flight(msgspec.Struct, frozen=True, eq=False):
    """The request now at an upstream, so that it can be called back."""

    target: Target
    request_id: str

    @property
    def upstream(self) -> Upstream:
        return self.target.upstream

    async def abort(self) -> bool:
        """Ask the engine to end it now. False when it cannot be asked or does not know it (yet)."""
        return self.upstream.is_engine and await self.upstream.abort(self.request_id)
