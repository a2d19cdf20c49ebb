"""Ids sort by the time of their making, and are what Python knows as UUIDs."""

import copy
import pickle
import uuid
from datetime import UTC, datetime, timedelta

from billing.ids import new_id, new_written_id, smallest_id


def test_ids_are_standard_uuids_in_the_order_of_their_making() -> None:
    made = [new_id() for _ in range(10_000)]
    assert made == sorted(set(made))
    for one in (made[0], made[-1]):
        assert (one.version, one.variant) == (7, uuid.RFC_4122)
        assert one == uuid.UUID(str(one)) == copy.copy(one) == pickle.loads(pickle.dumps(one))
        assert hash(one) == hash(uuid.UUID(str(one))) and one.bytes == uuid.UUID(str(one)).bytes


def test_an_id_and_its_text_are_the_same() -> None:
    one, text = new_written_id()
    assert str(one) == text


def test_an_id_lies_in_the_moment_it_was_made_in() -> None:
    now = datetime.now(UTC)
    assert (
        smallest_id(now - timedelta(milliseconds=1)) < new_id() < smallest_id(datetime.now(UTC) + timedelta(seconds=1))
    )
