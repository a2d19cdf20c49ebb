"""Where an operation's time went: one bar an attempt, cut into waiting, reading the prompt and writing the answer."""

from datetime import datetime

import msgspec

from billing.records import AttemptRecord, OperationRecord


class Segment(msgspec.Struct, frozen=True):
    kind: str
    """`queue`, `first` or `rest`; also the CSS class."""
    name: str
    seconds: float
    left: float
    """Per cent of the operation's whole time, as is `width`."""
    width: float


class Bar(msgspec.Struct, frozen=True):
    attempt: AttemptRecord
    segments: list[Segment]


def timeline(operation: OperationRecord) -> list[Bar]:
    ends = [_offset(operation.started_at, each.started_at) + each.total_seconds for each in operation.attempts]
    whole = max([operation.total_seconds, *ends])
    return [Bar(attempt, _segments(operation.started_at, attempt, whole)) for attempt in operation.attempts]


def first_token(operation: OperationRecord) -> float | None:
    """Seconds to the first token that was sent; where the answer was not streamed, to the first that was made."""
    if operation.ttft_seconds is not None:
        return operation.ttft_seconds
    made = [
        _offset(operation.started_at, each.started_at) + each.ttft_seconds
        for each in operation.attempts
        if each.ttft_seconds is not None
    ]
    return min(made, default=None)


def _segments(started_at: datetime, attempt: AttemptRecord, whole: float) -> list[Segment]:
    """Up to three pieces that together last `total_seconds`; a part that was not reported is not drawn."""
    end = attempt.total_seconds
    first = min(attempt.ttft_seconds, end) if attempt.ttft_seconds is not None else None
    queued = min(attempt.queue_seconds or 0.0, end if first is None else first)
    pieces = [("queue", "Queued", 0.0, queued)]
    if first is None:
        pieces.append(("first", "Waiting for a token that never came", queued, end))
    else:
        pieces += [("first", "To the first token", queued, first), ("rest", "First token to last", first, end)]
    offset = _offset(started_at, attempt.started_at)
    return [
        Segment(kind, name, to - since, _percent(offset + since, whole), _percent(to - since, whole))
        for kind, name, since, to in pieces
        if to > since
    ]


def _offset(start: datetime, at: datetime) -> float:
    return max((at - start).total_seconds(), 0.0)


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 3) if whole else 0.0
