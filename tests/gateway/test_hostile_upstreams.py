"""Upstreams that send what cannot be right: the caller keeps a good answer, and every request has one row."""

from typing import Any

import msgspec
import pytest

from gateway.upstreams import connection
from tests.gateway.running import Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Script, Scripted, account
from tests.gateway.test_budgets import limit, settled

CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 12, "completion_tokens": 3}


def saying(**fields: Any) -> Script:
    """A good answer with these fields beside it, as one reply or as a stream."""

    async def script(request: Request, connection: Connection) -> None:
        if request.body.get("stream"):
            await connection.start()
            await connection.frame({"choices": [{"index": 0, "delta": {"content": "hello"}, "finish_reason": "stop"}]})
            await connection.frame({"choices": [], **fields})
            await connection.done()
        else:
            await connection.json({"choices": [CHOICE], **fields})

    return script


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_only_an_engine_is_believed_about_its_account(gateway: Gateway, upstream: Scripted, stream: bool) -> None:
    upstream.script = saying(usage=USAGE, farthing=account(1))
    answer = await gateway.chat(model="hosted", stream=stream)
    assert answer.status_code == 200 and "farthing" not in answer.text
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["usage_source"], attempt["usage_flag"]) == ("upstream", None)
    assert (attempt["input_fresh"], attempt["input_cached"], attempt["output_text"]) == (12, 0, 3)
    assert (attempt["prefill_device_seconds"], attempt["generated_tokens"]) == (None, None)


@pytest.mark.parametrize(
    "bad", [{"input_fresh": -5}, {"decode_device_seconds": -1.0}, {"generated_tokens": 10**30}, {"queue_seconds": "x"}]
)
async def test_an_account_that_cannot_be_right(
    gateway: Gateway, upstream: Scripted, stream: bool, bad: dict[str, Any]
) -> None:
    await limit(gateway, 10_000)
    upstream.script = saying(usage=USAGE, farthing=msgspec.to_builtins(account(3)) | bad)
    answer = await gateway.chat(stream=stream, max_tokens=5)
    assert answer.status_code == 200 and "hello" in answer.text and '"error"' not in answer.text
    row = await gateway.row()
    (attempt,) = row["attempts"]
    assert (row["status"], attempt["input_fresh"], attempt["output_text"], attempt["cost"]) == ("ok", 10, 3, None)
    assert "farthing" in attempt["usage_flag"]
    assert await settled(gateway, 1) == 10 * 10 + 3 * 20, "its usage says 12, but its tokenizer had counted 10"


async def test_what_cannot_be_settled_has_a_row_of_unknown_money(
    settings: dict[str, Any], upstream: Scripted, stream: bool
) -> None:
    settings["models"]["tiny"]["price"] |= {"output_text": "0." + "3" * 500}  # 3 of these have no exact product
    upstream.words = ["a"] * 7
    async with running_gateway(settings) as gateway:
        answer = await gateway.chat(stream=stream)
        assert answer.status_code == 200 and '"error"' not in answer.text
        row = await gateway.row()
        (attempt,) = row["attempts"]
        assert (row["status"], row["billed"], row["cost"], attempt["billed"]) == ("ok", None, None, None)
        assert "could not be settled" in attempt["usage_flag"]
        assert attempt["generated_tokens"] == 7


async def test_absurd_counts_are_cut_and_flagged(gateway: Gateway, upstream: Scripted, stream: bool) -> None:
    await limit(gateway, 10_000)
    upstream.script = saying(usage={"prompt_tokens": 10**30, "completion_tokens": 10**400, "total_tokens": 10**500})
    answer = await gateway.chat(model="hosted", stream=stream, max_tokens=5)
    assert answer.status_code == 200
    (attempt,) = (await gateway.row())["attempts"]
    assert attempt["output_text"] == 5 and attempt["input_fresh"] < 1000
    assert "prompt_tokens is more than" in attempt["usage_flag"] and "is not charged" in attempt["usage_flag"]
    assert attempt["cost"] > attempt["billed"], "what it cost is what the upstream says"
    assert 100 < await settled(gateway, 1) <= 10_000


@pytest.mark.parametrize(
    ("usage", "source", "fresh", "text"),
    [
        ({"prompt_tokens": 12.0, "completion_tokens": 3.0}, "upstream", 12, 3),
        ({"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15.5}, "upstream", 12, 3),
        ({"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": "none"}, "upstream", 12, 3),
        ({"prompt_tokens": None, "completion_tokens": 3}, "estimated", 5, 2),
        ({"prompt_tokens": 12, "completion_tokens": 2.5}, "estimated", 5, 2),
        ({"prompt_tokens": "12", "completion_tokens": True}, "estimated", 5, 2),
        ({}, "estimated", 5, 2),
        ([], "estimated", 5, 2),
    ],
)
async def test_odd_usage_never_costs_the_caller_its_answer(
    gateway: Gateway, upstream: Scripted, stream: bool, usage: Any, source: str, fresh: int, text: int
) -> None:
    upstream.script = saying(usage=usage)
    messages = [{"role": "user", "content": "x" * 20}]
    answer = await gateway.chat(model="hosted", stream=stream, messages=messages)
    assert answer.status_code == 200 and '"error"' not in answer.text and "hello" in answer.text
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["usage_source"], attempt["input_fresh"], attempt["output_text"]) == (source, fresh, text)
    assert attempt["usage_flag"].startswith("usage: ")


async def test_a_negative_count_of_an_answer_that_breaks_off(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        usage = {"prompt_tokens": 1, "completion_tokens": -5}
        await connection.frame({"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": usage})
        connection.die()

    upstream.script = script
    await gateway.chat(model="hosted", stream=True)
    row = await gateway.row()
    assert (row["status"], row["attempts"][0]["output_text"]) == ("upstream_error", 0)


async def test_a_reply_without_end_is_cut(
    gateway: Gateway, upstream: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        while True:
            await connection.chunk(b"x" * 1000)

    monkeypatch.setattr(connection, "MAX_REPLY_BYTES", 100_000)
    upstream.script = script
    answer = await gateway.chat(model="hosted")
    assert answer.status_code == 502
    assert "it sent more than 100000 bytes" in answer.json()["error"]["message"]
    assert (await gateway.row())["status"] == "upstream_error"
