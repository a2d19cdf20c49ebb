"""The response cache's memory: its bound, what goes first, what a changed configuration does, who never gets in."""

import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.records import UNSETTLED, TokenClasses
from gateway.exchange import Exchange
from gateway.keep_alive import COMMENT
from gateway.operation import Attempt, Operation, Priced
from gateway.response_cache import LARGEST_SHARE, OVERHEAD_BYTES, Kept, Lookup, ResponseCache
from gateway.settings import Settings
from gateway.trusted import SCOPE_ENTRY, Trusted
from tests.gateway.running import configuration
from tests.gateway.samples import chat_call
from tests.gateway.test_answer_key import principal

BOUND = 100_000
LARGEST = BOUND // LARGEST_SHARE


def configured(**limits: int) -> Settings:
    values = configuration("http://127.0.0.1:1/v1", "postgresql+asyncpg://x/y", Path("/nowhere"))
    values["limits"] = {"response_cache_bytes": BOUND} | limits
    values["models"]["tiny"]["response_cache"] = {"seconds": 60}
    return Settings(**values)


SETTINGS = configured()


def exchange(trusted: Trusted | None = None, **headers: str) -> Exchange:
    async def nothing(*_: Any) -> Any:
        raise AssertionError("nothing is read or sent")

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"method": "POST", "headers": pairs} | ({} if trusted is None else {SCOPE_ENTRY: trusted})
    return Exchange(scope, nothing, nothing)


def look_up(cache: ResponseCache, text: str = "hi", of: Settings = SETTINGS, by: Exchange | None = None) -> Lookup:
    return cache.look_up(of, chat_call(text), "tiny", principal(), by or exchange())


def kept(size: int, seconds: float = 60) -> Kept:
    now = time.monotonic()
    return Kept(b"x" * size, now, now + seconds, "stop", (), UUID(int=1), 1, 1, None, None)


def keep(cache: ResponseCache, text: str, size: int = 10, of: Settings = SETTINGS) -> None:
    key = look_up(cache, text, of).key
    assert key is not None
    cache.put(key, kept(size), of)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, LARGEST + 100), st.booleans()), max_size=60))
def test_it_never_takes_more_than_its_bound_and_drops_what_was_asked_for_longest_ago(
    steps: list[tuple[int, int, bool]],
) -> None:
    cache = ResponseCache()
    model: dict[int, int] = {}
    for name, size, asks in steps:
        found = look_up(cache, str(name)).found
        assert (None if found is None else len(found.body)) == model.get(name)
        if name in model:
            model[name] = model.pop(name)
        if not asks:
            keep(cache, str(name), size)
            if size + OVERHEAD_BYTES <= LARGEST:
                model.pop(name, None)
                model[name] = size
                while sum(each + OVERHEAD_BYTES for each in model.values()) > BOUND:
                    model.pop(next(iter(model)))
        assert cache.size == sum(each + OVERHEAD_BYTES for each in model.values()) <= BOUND
        assert len(cache) == len(model)


def test_a_changed_configuration_empties_it() -> None:
    cache, changed = ResponseCache(), configured()
    keep(cache, "hi")
    assert look_up(cache).outcome == "hit"
    assert look_up(cache, of=changed).outcome == "miss" and cache.size == 0


def test_what_was_asked_before_a_change_is_not_kept_after_it() -> None:
    cache, changed = ResponseCache(), configured()
    before = look_up(cache)
    look_up(cache, of=changed)
    assert before.key is not None
    cache.put(before.key, kept(10), SETTINGS)
    assert len(cache) == 0


def test_lines_of_a_batch_neither_read_nor_fill_it() -> None:
    cache = ResponseCache()
    keep(cache, "hi")
    lookup = look_up(cache, by=exchange(Trusted(principal(), "batch", 1, {})))
    assert (lookup.outcome, lookup.key, lookup.found) == ("bypass", None, None)


def test_a_stream_s_signs_of_life_are_no_part_of_what_is_kept() -> None:
    lookup = look_up(ResponseCache())
    for piece in (b"data: a\n\n", COMMENT, b"data: b\n\n"):
        lookup.take(piece)
    assert b"".join(lookup._pieces) == b"data: a\n\ndata: b\n\n"


def test_what_is_no_json_has_no_key() -> None:
    call = chat_call(odd=1)
    call.fields["odd"] = type(call.fields["odd"])(b"[" * 100_000 + b"]" * 100_000)
    lookup = ResponseCache().look_up(SETTINGS, call, "tiny", principal(), exchange())
    assert (lookup.outcome, lookup.key) == ("bypass", None)


def answered(**changes: Any) -> Operation:
    """An operation whose answer was sent, whole and well, but for `changes` of it or of its attempt."""
    operation = Operation(principal=principal(), model="tiny", finish_reason="stop")
    attempt = Attempt(1, "engine", "tiny", True)
    operation.attempts = [attempt]
    operation.priced = [Priced(TokenClasses(), "engine", changes.pop("flag", None), None, None, None, None)]
    for name, value in changes.items():
        setattr(operation if hasattr(operation, name) else attempt, name, value)
    return operation


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({}, True),
        ({"status": "upstream_error"}, False),
        ({"http_status": 500}, False),
        ({"cut": True}, False),
        ({"finish_reason": "abort"}, False),
        ({"finish_reason": None}, False),
        ({"finish_reason": "length"}, True),
        ({"flag": UNSETTLED}, False),
    ],
)
def test_only_what_ended_well_is_kept(changes: dict[str, Any], is_kept: bool) -> None:
    cache, sent = ResponseCache(), exchange()
    lookup = look_up(cache)
    lookup.take(b"{}")
    sent.complete = True
    lookup.keep(answered(**changes), sent, chat_call(), None)
    assert (look_up(cache).found is not None) == is_kept


@pytest.mark.parametrize(("complete", "gone"), [(False, False), (True, True)])
def test_what_its_caller_did_not_get_is_not_kept(complete: bool, gone: bool) -> None:
    cache, sent = ResponseCache(), exchange()
    lookup = look_up(cache)
    sent.complete, sent.gone = complete, gone
    lookup.keep(answered(), sent, chat_call(), None)
    assert len(cache) == 0
