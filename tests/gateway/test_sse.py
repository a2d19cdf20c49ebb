"""Events come out whole, however the stream's bytes are cut."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams import sse
from gateway.upstreams.sse import Event, EventReader, EventTooLargeError

TEXT = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))


def cut(data: bytes, places: list[int]) -> Iterator[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    for start, end in pairwise(edges):
        yield data[start:end]


def read(data: bytes, *places: int) -> list[Event]:
    reader = EventReader()
    return [event for chunk in cut(data, list(places)) for event in reader.feed(chunk)]


@given(st.lists(TEXT, max_size=5), st.lists(st.integers(0, 10_000), max_size=20), st.sampled_from(["\n", "\r\n"]))
def test_any_cut_gives_the_same_events(texts: list[str], places: list[int], end: str) -> None:
    data = "".join(f": comment{end}id: 1{end}data: {text}{end}{end}" for text in texts).encode()
    assert [payload.decode() for _, payload in read(data, *places)] == texts


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_a_name_goes_with_its_own_event_alone(places: list[int]) -> None:
    data = b"event: one\ndata: 1\n\ndata: 2\n\nevent: none\n\ndata: 3\n\nevent:four\ndata: 4\n\n"
    assert read(data, *places) == [(b"one", b"1"), (None, b"2"), (None, b"3"), (b"four", b"4")]


def test_an_event_without_its_end_is_dropped() -> None:
    assert read(b"data: a\n\ndata: b\n") == [(None, b"a")]


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_a_payload_is_one_line_whatever_breaks_it(places: list[int]) -> None:
    data = b"data: a\ndata:b\n\ndata: c\rd\n\ndata: e\n\n\n\ndata: f\n\n"
    assert [payload for _, payload in read(data, *places)] == [b"a b", b"c d", b"e", b"f"]


@pytest.mark.parametrize("piece", [b"x", b"data: x\n", b"data:\n"], ids=["one line", "many lines", "empty lines"])
def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    reader = EventReader()
    with pytest.raises(EventTooLargeError):
        for _ in range(2000):
            assert list(reader.feed(piece)) == []


def test_many_events_are_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    assert len(read(b"data: abc\n\n" * 1000, 5000)) == 1000
