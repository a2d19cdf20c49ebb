"""Events come out whole, however the stream's bytes are cut."""

from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams import sse
from gateway.upstreams.sse import EventTooLargeError, events

TEXT = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"))


async def cut(data: bytes, places: list[int]) -> AsyncIterator[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    for start, end in pairwise(edges):
        yield data[start:end]


@given(st.lists(TEXT, max_size=5), st.lists(st.integers(0, 10_000), max_size=20), st.sampled_from(["\n", "\r\n"]))
async def test_any_cut_gives_the_same_events(texts: list[str], places: list[int], end: str) -> None:
    data = "".join(f": comment{end}id: 1{end}data: {text}{end}{end}" for text in texts).encode()
    assert [event.decode() async for event in events(cut(data, places))] == texts


async def test_an_event_without_its_end_is_dropped() -> None:
    assert [event async for event in events(cut(b"data: a\n\ndata: b\n", []))] == [b"a"]


async def test_lines_of_one_event_are_joined() -> None:
    assert [event async for event in events(cut(b"data: a\ndata:b\n\n", []))] == [b"a\nb"]


@pytest.mark.parametrize("piece", [b"x", b"data: x\n", b"data:\n"], ids=["one line", "many lines", "empty lines"])
async def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(2000):
            yield piece

    with pytest.raises(EventTooLargeError):
        assert [event async for event in events(endless())] == []


async def test_many_events_are_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    assert len([event async for event in events(cut(b"data: abc\n\n" * 1000, [5000]))]) == 1000
