"""Lines of batches: how a file is cut into them, what they may say, what becomes of an answer."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches.input import MAX_ERRORS, MAX_LINES, numbered_lines, read_input
from gateway.batches.lines import LineError, answered, body_of, read_line, unanswered, usage_of
from gateway.batches.outcome import MAX_TRIES, is_busy, seconds_to_wait
from gateway.trusted import Answer
from tests.gateway.batching import CHAT, jsonl, request


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


@given(st.lists(st.sampled_from([b"a", b"\n", b"bc\r", b"\xc3", b""]), max_size=30), st.integers(1, 7))
async def test_however_a_file_is_cut(parts: list[bytes], size: int) -> None:
    whole = b"".join(parts)
    cut = [whole[start : start + size] for start in range(0, len(whole), size)]
    found = [line async for line in numbered_lines(pieces(*cut), 1000)]
    wanted = whole.split(b"\n")
    assert [raw for _, _, raw in found] == (wanted if wanted[-1] else wanted[:-1])
    assert [number for number, _, _ in found] == list(range(1, len(found) + 1))
    assert all(whole[position : position + len(raw)] == raw for _, position, raw in found)


async def test_a_line_that_is_too_long() -> None:
    data = jsonl([request("a"), request("b", "x" * 5000)])
    for cut in (pieces(data), pieces(data[:3000], data[3000:])):
        found = await read_input(cut, CHAT, 2000)
        assert [(error["line"], error["code"]) for error in found.errors] == [(2, "line_too_long")]


async def test_no_more_lines_and_errors_than_a_batch_can_have() -> None:
    many = jsonl([request(str(n)) for n in range(MAX_LINES)])
    assert len((await read_input(pieces(many), CHAT, 2000)).lines) == MAX_LINES
    found = await read_input(pieces(many, jsonl([request("one more")])), CHAT, 2000)
    assert [(error["line"], error["code"]) for error in found.errors] == [(None, "too_many_requests")]
    found = await read_input(pieces(b"{\n" * 1000), CHAT, 2000)
    assert len(found.errors) == MAX_ERRORS + 1 and found.errors[-1]["code"] == "too_many_errors"


async def test_the_model_of_a_batch() -> None:
    one = await read_input(pieces(jsonl([request("a"), request("b")])), CHAT, 2000)
    two = await read_input(pieces(jsonl([request("a"), request("b", model="big")])), CHAT, 2000)
    assert (one.model, two.model) == ("tiny", None)


def test_a_line_says_where_it_is_and_how_long_its_prompt_is() -> None:
    raw = jsonl([request("a", "x" * 400)])[:-1]
    line = read_line(raw, 3, 77, CHAT)
    assert (line.number, line.position, line.length, line.custom_id) == (3, 77, len(raw), "a")
    assert 100 <= line.prompt_tokens < 115
    assert json.loads(body_of(raw)) == request("a", "x" * 400)["body"]


@pytest.mark.parametrize(
    "raw", [b"7", b"[]", b'"a"', b"{", b'{"a":1}x', b'{"body":{"x":"\\ud800"}}', b"\xff", b"[" * 9999]
)
def test_what_is_no_line(raw: bytes) -> None:
    with pytest.raises(LineError) as caught:
        read_line(raw, 1, 0, CHAT)
    assert caught.value.code == "invalid_json_line"


@pytest.mark.parametrize("stream", [False, None])
def test_no_stream_may_be_said(stream: Any) -> None:
    read_line(jsonl([request("a", stream=stream)]), 1, 0, CHAT)


def test_output_lines_are_lines() -> None:
    pretty = json.dumps({"a": [1.5, 10**30], "b": "x\ny"}, indent=2).replace("\n", "\r\n").encode()
    for line, body in (
        (answered("c\n", 200, "id", pretty), {"a": [1.5, 10**30], "b": "x\ny"}),
        (answered("c\n", 502, "id", b"<html>\n\xff"), "<html>\n\ufffd"),
        (answered("c\n", 200, "id", b""), ""),
    ):
        assert line.count(b"\n") == 1 and line.endswith(b"\n") and b"\r" not in line
        found = json.loads(line)
        assert found["custom_id"] == "c\n" and found["response"]["body"] == body and found["error"] is None
    found = json.loads(unanswered("c", "batch_expired", "Too late."))
    assert found["response"] is None and found["error"] == {"code": "batch_expired", "message": "Too late."}


@pytest.mark.parametrize(
    ("usage", "wanted"),
    [
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 2},
            },
            (10, 4, 5, 2),
        ),
        ({"prompt_tokens": 3, "total_tokens": 3}, (3, 0, 0, 0)),
        (
            {
                "input_tokens": 7,
                "input_tokens_details": {"cached_tokens": 1},
                "output_tokens": 2,
                "output_tokens_details": {"reasoning_tokens": 1},
            },
            (7, 1, 2, 1),
        ),
        ({"prompt_tokens": 10**30, "completion_tokens": 1}, ()),  # would not fit, and cost its neighbours their results
        ({"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": -1}}, ()),
        ("many", ()),
        (None, ()),
    ],
)
def test_usage(usage: Any, wanted: tuple[int, ...]) -> None:
    assert tuple(usage_of(json.dumps({"usage": usage}).encode()).values()) == wanted


@pytest.mark.parametrize(
    ("answer", "tries", "wait", "busy"),
    [
        (Answer(200, {}, bytearray(), True), 1, None, False),
        (Answer(400, {}, bytearray(), True), 1, None, False),
        (Answer(402, {"x-should-retry": "false"}, bytearray(), True), 1, None, False),
        (Answer(429, {"retry-after": "7"}, bytearray(), True), MAX_TRIES, 7, True),
        (Answer(429, {"retry-after": "Mon, 30 Nov 2026 10:00:00 GMT"}, bytearray(), True), 1, 1, True),
        (Answer(429, {"x-should-retry": "false"}, bytearray(), True), 1, None, False),
        (Answer(503, {}, bytearray(), True), MAX_TRIES, 1, True),
        (Answer(502, {}, bytearray(), True), MAX_TRIES - 1, 1, False),
        (Answer(502, {}, bytearray(), True), MAX_TRIES, None, False),
        (Answer(200, {}, bytearray(b"half"), False), 1, 1, False),
        (Answer(), MAX_TRIES, None, False),
    ],
)
def test_which_answers_are_final(answer: Answer, tries: int, wait: float | None, busy: bool) -> None:
    assert (seconds_to_wait(answer, tries), is_busy(answer)) == (wait, busy)
