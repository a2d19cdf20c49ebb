"""Which requests count as the very same: values of JSON, not its bytes; and nobody reads as somebody else."""

import json
import time
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.people import Principal
from gateway.answer_key import answer_key, canonical
from gateway.api.chat import ChatSurface
from gateway.api.messages import MessagesSurface
from gateway.api.responses import ResponsesSurface
from gateway.call import Call
from gateway.settings import SharedBy
from tests.gateway.samples import chat_call

ORGS, TEAMS, KEYS = ([UUID(int=n * 10 + 1), UUID(int=n * 10 + 2)] for n in range(3))

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
principals = st.builds(
    lambda org, team, key: principal(org_id=org, team_id=team, key_id=key),
    st.sampled_from(ORGS),
    st.sampled_from([None, *TEAMS]),
    st.sampled_from(KEYS),
)
sharing: st.SearchStrategy[SharedBy] = st.sampled_from(["org", "team", "key"])


def principal(**changes: Any) -> Principal:
    fields: dict[str, Any] = {"key_id": KEYS[0], "org_id": ORGS[0], "team_id": None, "user_id": None, "name": "k"}
    return Principal(**fields | {"expires_at": None, "revoked_at": None} | changes)


def key(call: Call | None = None, model: str = "tiny", shared_by: SharedBy = "org", **who: Any) -> bytes:
    return answer_key(call or chat_call(), model, principal(**who), shared_by)


def shuffled(value: Any) -> Any:
    """The same JSON value with the names of its objects in another order."""
    if isinstance(value, dict):
        return {name: shuffled(value[name]) for name in reversed(value)}
    return [shuffled(each) for each in value] if isinstance(value, list) else value


@given(values)
def test_the_order_of_names_and_the_spelling_of_characters_are_no_difference(value: Any) -> None:
    plain = canonical(json.dumps(value).encode())
    assert canonical(json.dumps(shuffled(value), ensure_ascii=False, indent=1).encode()) == plain


@given(values, values)
def test_only_equal_values_are_the_same(one: Any, other: Any) -> None:
    def exact(value: Any) -> str:
        return json.dumps(value, sort_keys=True)

    assert (canonical(exact(one).encode()) == canonical(exact(other).encode())) == (exact(one) == exact(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"1", b"1.0"),
        (b"1", b'"1"'),
        (b'{"number":"1"}', b"1"),
        (b'{"object":[]}', b"{}"),
        (b'{"a":1,"a":2}', b'{"a":2}'),
        (b'{"a":1,"a":2}', b'{"a":2,"a":1}'),
        (b'{"a":1}', b'[["a",1]]'),
        (b"123456789012345678901", b"123456789012345678902"),
        (b"0.1", b"0.10000000000000000001"),
        (b"null", b'""'),
    ],
)
def test_what_may_mean_something_else_is_something_else(one: bytes, other: bytes) -> None:
    assert canonical(one) != canonical(other)


def test_who_asks_and_how_it_is_watched_are_no_difference() -> None:
    same: dict[str, Any] = {
        "user": "u-1",
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "stream_options": {"include_usage": True},
    }
    assert key(chat_call(**same)) == key(chat_call())
    assert key(chat_call(stream=True)) != key(chat_call())
    assert key(chat_call(stream=True, **same)) != key(chat_call(stream=True)), "a stream with usage has other events"


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 0}, {"seed": 1}, {"n": 2}, {"tools": []}, {"unheard_of": None}, {"logprobs": True}],
)
def test_everything_else_counts(changes: dict[str, Any]) -> None:
    assert key(chat_call(**changes)) != key(chat_call())


def test_another_model_text_or_surface_is_another_request() -> None:
    assert len({key(), key(model="big"), key(chat_call("hi ")), key(chat_call(model="auto"))}) == 4
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    raw = msgspec.json.encode(body)
    messages = MessagesSurface().decode(raw)
    assert key(messages) != key(ChatSurface().decode(raw))
    assert key(msgspec.structs.replace(messages, betas="context-1m")) != key(messages)


def test_a_response_repeats_what_it_was_told_so_that_all_of_it_counts() -> None:
    def response(**fields: Any) -> Call:
        return ResponsesSurface().decode(msgspec.json.encode({"model": "tiny", "input": "hi"} | fields))

    assert len({key(response()), key(response(user="u")), key(response(metadata={"a": "b"}))}) == 3


@given(principals, principals, sharing)
def test_answers_are_shared_in_the_group_and_never_beyond_it(a: Principal, b: Principal, shared_by: SharedBy) -> None:
    def group(who: Principal) -> tuple[Any, ...]:
        if shared_by == "org":
            return (who.org_id,)
        return (who.org_id, who.team_id) if shared_by == "team" and who.team_id else (who.org_id, None, who.key_id)

    found = [answer_key(chat_call(), "tiny", who, shared_by) for who in (a, b)]
    assert (found[0] == found[1]) == (group(a) == group(b))


def test_names_and_values_cannot_run_together() -> None:
    assert key(chat_call(a="x", b="y")) != key(chat_call(**{'a"x"body b': "y"}))


def test_what_is_nested_too_deeply_has_no_key() -> None:
    with pytest.raises(RecursionError):
        canonical(b"[" * 100_000 + b"]" * 100_000)


@pytest.mark.parametrize("value", [b"0", b"{}", b'{"a":1}'])
def test_very_many_values_count_as_their_bytes_so_that_they_hold_up_nobody(value: bytes) -> None:
    """Read one by one, these took seconds of everybody's event loop, and a hundred times their memory."""

    def asked(spaces: bytes = b"", last: bytes = b"1") -> Call:
        many = msgspec.Raw(b"[" + value + (b"," + spaces + value) * 500_000 + b"," + last + b"]")
        return msgspec.structs.replace(chat_call(), fields=chat_call().fields | {"x": many})

    began = time.thread_time()
    found = key(asked())
    assert time.thread_time() - began < 0.5
    assert found == key(asked()) and found not in (key(asked(spaces=b" ")), key(asked(last=b"2")))
