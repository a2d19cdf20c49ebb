"""What a failed attempt means: what the caller is told, and whether asking again can help."""

import email.utils
import math
import time
from collections.abc import Mapping
from typing import Literal

from gateway.errors import NO_RETRY, ApiError, UpstreamReplyError, unavailable
from gateway.upstreams.frames import error_message
from gateway.upstreams.upstream import Upstream

PASSED_THROUGH = frozenset({400, 404, 409, 413, 415, 422, 429})
"""Upstream answers that concern the caller's request; anything else concerns the operator and becomes a 502."""
PASSED_HEADERS = ("content-type", "retry-after", "x-should-retry")
_WHETHER_AGAIN = {"retry-after", "x-should-retry"}
BUSY_RETRY_SECONDS = 1
"""What callers are told who came too often, where nobody says more."""
LONGEST_WAIT_SECONDS = 24 * 3600.0
REPEATABLE = frozenset({408, 500, 502, 503, 504, 529})
"""Nothing was computed, or it was lost before a byte of it: another try may succeed. 529: an upstream is overloaded."""

Again = Literal["soon", "elsewhere", "never"]
"""`soon`: the same upstream may answer the next time. `elsewhere`: only another one."""


class NoAnswerError(Exception):
    """An attempt came to nothing, before a byte for the caller.

    `counts`: it is one of the retries. `broken`: the request may be what broke the upstream. `falls_back`: another
    model may answer instead. `retry_after`: seconds for which the upstream wants no further request.
    """

    def __init__(
        self,
        error: ApiError,
        again: Again,
        *,
        counts: bool = False,
        broken: bool = False,
        falls_back: bool = True,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.again: Again = again
        self.counts = counts
        self.broken = broken
        self.falls_back = falls_back
        self.retry_after = retry_after


def away(upstream: Upstream) -> NoAnswerError:
    """It refuses connections."""
    return NoAnswerError(unavailable(f"The upstream {upstream.name} cannot be reached."), "soon")


def loading(upstream: Upstream) -> NoAnswerError:
    """An engine that answers 503 loads its models: as good as unreachable."""
    return NoAnswerError(unavailable(f"The upstream {upstream.name} is not ready."), "soon")


def silent(upstream: Upstream) -> NoAnswerError:
    return NoAnswerError(_failed(504, f"The upstream {upstream.name} did not answer in time."), "never")


def broken(upstream: Upstream, reason: Exception) -> NoAnswerError:
    error = _failed(502, f"The upstream {upstream.name} closed the connection: {reason}.")
    return NoAnswerError(error, "soon", counts=True, broken=True)


def incomplete(upstream: Upstream, reason: Exception) -> NoAnswerError:
    """Its headers were good, but the connection broke before its answer was whole."""
    return NoAnswerError(_failed(502, _incomplete(upstream, str(reason))), "soon", counts=True, broken=True)


def no_answer(upstream: Upstream, words: str, noted: str) -> NoAnswerError:
    """What came under a good status is no answer. `noted`: `words` as the ledger may keep them."""
    error = _failed(502, _incomplete(upstream, words), _incomplete(upstream, noted))
    return NoAnswerError(error, "soon", counts=True)


def of_reply(upstream: Upstream, status: int, headers: Mapping[str, str], body: bytes) -> NoAnswerError:
    """Of an answer that is an error."""
    wait = retry_after(headers)
    if status in PASSED_THROUGH and body:
        passed = {name: headers[name] for name in PASSED_HEADERS if name in headers}
        if status == 429 and _WHETHER_AGAIN.isdisjoint(passed):
            passed |= NO_RETRY if b'"insufficient_quota"' in body else {"retry-after": str(BUSY_RETRY_SECONDS)}
        words = error_message(body)
        error: ApiError = UpstreamReplyError(status, body, words, passed, words if upstream.is_engine else None)
        if status != 429:
            return NoAnswerError(error, "never", falls_back=False)
    elif status == 503:
        text = f"The upstream {upstream.name} is not ready."
        error = unavailable(text, retry_after=math.ceil(wait)) if wait else unavailable(text)
    else:
        error = _failed(502, f"The upstream {upstream.name} answered {status}.")
        if status == 402:
            error.headers |= NO_RETRY  # what is used up there does not come back by asking again, and an SDK would
    repeatable = status in REPEATABLE
    return NoAnswerError(error, "soon" if repeatable else "elsewhere", counts=True, retry_after=wait)


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that an answer's Retry-After asks for, given as such or as a date, at most LONGEST_WAIT_SECONDS; 0 where
    it asks for nothing that can be read."""
    value = headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):  # the latter: a year of twenty digits
            return 0.0
    return min(seconds, LONGEST_WAIT_SECONDS) if 0 < seconds < math.inf else 0.0


def _incomplete(upstream: Upstream, words: str) -> str:
    return f"The upstream {upstream.name} failed before its answer was complete: {words.removesuffix('.')}."


def _failed(status: int, text: str, noted: str | None = None) -> ApiError:
    return ApiError(status, "upstream_error", text, outcome="upstream_error", noted=noted)
