"""A circuit breaker: an upstream that fails is left alone for a while, then one request tries it.

*closed*: every request may go. It opens after FAILURES_IN_A_ROW, or when half of the last requests failed.
*open*: none may, for OPEN_SECONDS, twice as long after each probe that fails.
*half-open*: one request probes; its success closes the breaker, its failure opens it again.
"""

FAILURES_IN_A_ROW = 5
FAILURE_RATE = 0.5
RATED_REQUESTS = 20
"""So many requests must have ended in the period before their rate says anything."""
PERIOD_SECONDS = 10.0
"""The rate is that of this period and the one before it."""
OPEN_SECONDS = 1.0
LONGEST_OPEN_SECONDS = 30.0


class Breaker:
    """Times are seconds of one monotonic clock, given by the caller."""

    __slots__ = ("_before", "_failed", "_in_a_row", "_open_for", "_open_until", "_passed", "_period_end", "_probing")

    def __init__(self) -> None:
        self._open_until: float | None = None
        self._open_for = OPEN_SECONDS
        self._probing = False
        self._in_a_row = self._failed = self._passed = 0
        self._before = (0, 0)
        self._period_end = 0.0

    @property
    def closed(self) -> bool:
        return self._open_until is None

    def ready(self, now: float) -> bool:
        """Whether a request may go: always while closed, one at a time once the open time is over."""
        return self._open_until is None or (now >= self._open_until and not self._probing)

    def ready_in(self, now: float) -> float:
        """Seconds until a probe may go; 0 while closed."""
        return 0.0 if self._open_until is None else max(self._open_until - now, 0.0)

    def start(self) -> None:
        """A request goes, after `ready` said so. It ends with exactly one of `passed`, `failed` and `abandoned`."""
        if self._open_until is not None:
            self._probing = True

    def passed(self, now: float) -> None:
        if self._open_until is not None:
            self._close()
        self._in_a_row = 0
        self._roll(now)
        self._passed += 1

    def failed(self, now: float, *, away: bool = False) -> None:
        """`away`: nothing was sent, so trying again soon costs nothing: it is left alone for OPEN_SECONDS at most."""
        self._roll(now)
        self._failed += 1
        self._in_a_row += 1
        if self._open_until is not None:
            if self._probing:
                self._open(now, away)
        elif self._in_a_row >= FAILURES_IN_A_ROW or self._rate_is_bad():
            self._open(now, away)

    def abandoned(self) -> None:
        """It ended without telling anything, for example because its caller left."""
        self._probing = False

    def _open(self, now: float, away: bool) -> None:
        if away:
            self._open_for = OPEN_SECONDS
        self._open_until = now + self._open_for
        self._open_for = min(2 * self._open_for, LONGEST_OPEN_SECONDS)
        self._probing = False

    def _close(self) -> None:
        self._open_until = None
        self._open_for = OPEN_SECONDS
        self._probing = False
        self._failed = self._passed = 0
        self._before = (0, 0)

    def _roll(self, now: float) -> None:
        if now < self._period_end:
            return
        recent = now < self._period_end + PERIOD_SECONDS
        self._before = (self._failed, self._passed) if recent else (0, 0)
        self._failed = self._passed = 0
        self._period_end = now + PERIOD_SECONDS

    def _rate_is_bad(self) -> bool:
        failed, passed = self._failed + self._before[0], self._passed + self._before[1]
        return failed + passed >= RATED_REQUESTS and failed >= FAILURE_RATE * (failed + passed)
