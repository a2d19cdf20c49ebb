from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import pytest

from billing.records import AttemptRecord, OperationRecord
from dashboards.web.timeline import timeline

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)


def attempt(number: int, after: float, total: float, queue: float | None, ttft: float | None) -> AttemptRecord:
    return AttemptRecord(
        number=number, upstream="engine", model="tiny", started_at=NOON + timedelta(seconds=after), status="ok",
        usage_source="engine", queue_seconds=queue, ttft_seconds=ttft, total_seconds=total,
    )  # fmt: skip


def operation(total: float, *attempts: AttemptRecord) -> OperationRecord:
    return OperationRecord(
        id=UUID(int=1), started_at=NOON, org_id=UUID(int=2), team_id=None, user_id=None, key_id=UUID(int=3),
        requested_model="auto", model="tiny", stream=False, status="ok", http_status=200, total_seconds=total,
        billed=Decimal(0), currency="USD", attempts=list(attempts),
    )  # fmt: skip


def test_parts_of_an_attempt_follow_each_other_and_fill_it() -> None:
    failed, answered = timeline(operation(10, attempt(1, 0, 2, None, None), attempt(2, 2.5, 7.5, 0.5, 1.5)))
    assert [(part.kind, part.seconds, part.left, part.width) for part in failed.segments] == [("first", 2, 0, 20)]
    assert [(part.kind, part.seconds, part.left, part.width) for part in answered.segments] == [
        ("queue", 0.5, 25, 5),
        ("first", 1, 30, 10),
        ("rest", 6, 40, 60),
    ]


@pytest.mark.parametrize(
    ("total", "one"),
    [
        (1, attempt(1, -5, 1, 9, 9)),  # a clock that went backwards, parts longer than the whole
        (1, attempt(1, 0.5, 3, 0, 0)),  # outlived its operation
        (0, attempt(1, 0, 0, None, None)),  # took no time at all
    ],
)
def test_odd_times_still_stay_inside_the_picture(total: float, one: AttemptRecord) -> None:
    [bar] = timeline(operation(total, one))
    for part in bar.segments:
        assert 0 <= part.left <= part.left + part.width <= 100.001
    assert sum(part.seconds for part in bar.segments) == one.total_seconds


def test_nothing_dispatched_has_no_bars() -> None:
    assert timeline(operation(1)) == []
