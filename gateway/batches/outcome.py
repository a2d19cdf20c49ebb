"""What an answer means for a line of a batch: it is its result, or the line is to be run again."""

from gateway.batches.claims import ClaimedLine
from gateway.trusted import Answer

MAX_TRIES = 3
"""For a line whose answers say that something broke, or that took the whole process down with it."""
FIRST_WAIT = 1.0
_BUSY = (429, 503)
"""Somebody else is served first, or an upstream restarts: tried again for as long as the completion window lasts."""


def seconds_to_wait(answer: Answer, tries: int) -> float | None:
    """How long to wait until this line is run again; None when its answer is final."""
    if is_busy(answer):
        return _retry_after(answer.headers.get("retry-after"))
    broken = not answer.complete or answer.status >= 500
    return FIRST_WAIT if broken and tries < MAX_TRIES else None


def is_busy(answer: Answer) -> bool:
    """Whether it says to come back later, which is no try of its own."""
    return answer.complete and answer.status in _BUSY and answer.headers.get("x-should-retry") != "false"


def gave_up(line: ClaimedLine) -> bool:
    """Whether earlier tries of this line never came to an end: each took its process with it, or seemed to."""
    return line.tries > MAX_TRIES


def _retry_after(value: str | None) -> float:
    try:
        return max(float(value or 0), FIRST_WAIT)
    except ValueError:  # a date
        return FIRST_WAIT
