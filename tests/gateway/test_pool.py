"""Several upstreams of one model: who is asked next when one fails, and what the ledger says of it."""

import asyncio
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gateway.upstreams.breaker import FAILURES_IN_A_ROW, OPEN_SECONDS
from tests.gateway.pooled import answering, bodies, hanging, pooled, until
from tests.gateway.running import Gateway
from tests.gateway.scripted import Connection, Request, Scripted
from tests.gateway.test_budgets import limit


async def attempts(gateway: Gateway, count: int = 1) -> list[tuple[int, str, str, int | None]]:
    row = (await gateway.rows(count))[-1]
    return [(a["number"], a["upstream"], a["status"], a["http_status"]) for a in row["attempts"]]


async def test_what_one_cannot_do_another_does_at_once(settings: dict[str, Any]) -> None:
    async with pooled(settings) as (gateway, a, b):
        a.script = answering(503)
        started = time.monotonic()
        assert (await gateway.chat(model="pair")).status_code == 200
        assert time.monotonic() - started < 1.0
        assert await attempts(gateway) == [(1, "a", "upstream_error", 503), (2, "b", "ok", 200)]
        row = await gateway.row()
        assert row["billed"] == row["attempts"][1]["billed"] > 0 and row["attempts"][0]["billed"] == 0
        assert (len(a.chats), len(b.chats)) == (1, 1)


async def test_two_failed_retries_and_a_success_are_one_charge(settings: dict[str, Any]) -> None:
    async with pooled(settings) as (gateway, a, b):
        a.script, b.script = answering(500, times=1), answering(502, times=1)
        assert (await gateway.chat(model="pair")).status_code == 200
        row = await gateway.row()
        assert [(x["upstream"], x["http_status"]) for x in row["attempts"]] == [("a", 500), ("b", 502), ("a", 200)]
        assert [x["billed"] for x in row["attempts"]][:2] == [0, 0]
        assert (row["status"], row["billed"]) == ("ok", row["attempts"][2]["billed"])


async def test_retries_end(settings: dict[str, Any]) -> None:
    async with pooled(settings, retries=1) as (gateway, a, b):
        a.script = b.script = answering(500)
        answer = await gateway.chat(model="pair")
        assert answer.status_code == 502 and "sorry" not in answer.text
        assert await attempts(gateway) == [(1, "a", "upstream_error", 500), (2, "b", "upstream_error", 500)]


async def test_a_refusal_of_the_request_is_not_carried_round(settings: dict[str, Any]) -> None:
    async with pooled(settings) as (gateway, a, b):
        a.script = answering(400)
        answer = await gateway.chat(model="pair")
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "sorry, 400")
        assert b.chats == []


async def test_a_refused_key_is_the_operators_concern_and_another_answers(settings: dict[str, Any]) -> None:
    async with pooled(settings) as (gateway, a, b):
        a.script = answering(401)
        assert (await gateway.chat(model="pair")).status_code == 200
        b.script = answering(401)
        answer = await gateway.chat(model="pair")
        assert answer.status_code == 502
        assert (len(a.chats), len(b.chats)) == (2, 2), "the same key is not tried twice"


async def test_a_busy_one_is_left_alone_for_as_long_as_it_asks(settings: dict[str, Any]) -> None:
    async with pooled(settings) as (gateway, a, b):
        a.script = answering(429, "retry-after: 30\r\n", times=1)
        for _ in range(3):
            assert (await gateway.chat(model="pair")).status_code == 200
        assert (len(a.chats), len(b.chats)) == (1, 3)


async def test_when_all_are_busy_the_caller_is_told_when_to_come_back(settings: dict[str, Any]) -> None:
    async with pooled(settings) as (gateway, a, b):
        a.script = b.script = answering(429, "retry-after: 7\r\n")
        answer = await gateway.chat(model="pair")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert (len(a.chats), len(b.chats)) == (1, 1)


async def test_retry_after_is_waited_for_within_the_window(settings: dict[str, Any]) -> None:
    async with pooled(settings, upstreams=["a"]) as (gateway, a, _):
        a.script = answering(503, "retry-after: 0.7\r\n", times=1)
        started = time.monotonic()
        assert (await gateway.chat(model="pair")).status_code == 200
        assert time.monotonic() - started >= 0.7
        a.script = answering(503, "retry-after: 9\r\n")
        answer = await gateway.chat(model="pair")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "9")
        assert len(a.chats) == 3


async def test_one_that_cannot_be_reached_costs_no_attempt(settings: dict[str, Any]) -> None:
    async with pooled(settings) as (gateway, a, _):
        await a.stop()
        assert (await gateway.chat(model="pair")).status_code == 200
        assert await attempts(gateway) == [(1, "b", "ok", 200)]


async def test_one_that_breaks_every_connection_is_not_tried_for_ever(settings: dict[str, Any]) -> None:
    async def die(_: Request, connection: Connection) -> None:
        connection.die()

    async with pooled(settings, retries=5) as (gateway, a, b):
        a.script = b.script = die
        assert (await gateway.chat(model="pair")).status_code == 502
        assert (len(a.chats), len(b.chats)) == (1, 1), "the request may be what breaks them"


async def test_an_upstream_that_fails_too_often_is_passed_over_until_it_works(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.upstreams.breaker.OPEN_SECONDS", 2.5)
    async with pooled(settings) as (gateway, a, b):
        a.script = answering(500)
        for _ in range(FAILURES_IN_A_ROW + 3):
            assert (await gateway.chat(model="pair")).status_code == 200
        assert (len(a.chats), len(b.chats)) == (FAILURES_IN_A_ROW, FAILURES_IN_A_ROW + 3)
        a.script = None
        await asyncio.sleep(2.5)
        for _ in range(3):
            assert (await gateway.chat(model="pair")).status_code == 200
        assert len(a.chats) == FAILURES_IN_A_ROW + 3


async def test_the_only_upstream_is_not_asked_while_it_fails(settings: dict[str, Any]) -> None:
    async with pooled(settings, upstreams=["a"], retries=0) as (gateway, a, _):
        a.script = answering(500)
        for _ in range(FAILURES_IN_A_ROW):
            assert (await gateway.chat(model="pair")).status_code == 502
        answer = await gateway.chat(model="pair")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "has failed too often" in answer.json()["error"]["message"]
        assert len(a.chats) == FAILURES_IN_A_ROW
        await asyncio.sleep(OPEN_SECONDS)
        a.script = None
        assert (await gateway.chat(model="pair")).status_code == 200


async def test_a_full_upstream_sends_on_and_a_full_pool_refuses(settings: dict[str, Any]) -> None:
    limited = [{"upstream": "a", "weight": 10**9, "max_concurrent": 1}, {"upstream": "b", "max_concurrent": 1}]
    async with pooled(settings, upstreams=limited) as (gateway, a, b):
        a.pause = b.pause = 0.3
        answers = await asyncio.gather(*(gateway.chat(model="pair") for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 503]
        (refused,) = (answer for answer in answers if answer.status_code == 503)
        assert refused.headers["retry-after"] == "1" and "as many requests as they may" in refused.text
        assert (len(a.chats), len(b.chats)) == (1, 1)
        assert (await gateway.chat(model="pair")).status_code == 200


async def test_callers_who_leave_give_their_places_back(settings: dict[str, Any]) -> None:
    limited = [{"upstream": "a", "max_concurrent": 3}]
    async with pooled(settings, upstreams=limited, retries=0) as (gateway, a, _):
        a.script = hanging
        pending = [asyncio.create_task(gateway.chat(model="pair")) for _ in range(3)]
        await until(lambda: len(a.chats) == 3)
        assert (await gateway.chat(model="pair")).status_code == 503
        for task in pending:
            task.cancel()
        await gateway.rows(4)
        a.script = None
        answers = await asyncio.gather(*(gateway.chat(model="pair") for _ in range(3)))
        assert {answer.status_code for answer in answers} == {200}


async def test_silence_is_not_repeated_elsewhere(settings: dict[str, Any]) -> None:
    async with pooled(settings, a={"first_byte_seconds": 0.3}) as (gateway, a, b):
        a.script = hanging
        started = time.monotonic()
        assert (await gateway.chat(model="pair")).status_code == 504
        assert time.monotonic() - started < 10, "it would never have answered"
        assert b.chats == [], "it may still be computed at a"
        assert await attempts(gateway) == [(1, "a", "upstream_error", None)]


async def test_a_fallback_answers_what_an_upstream_is_silent_about(
    settings: dict[str, Any], upstream: Scripted
) -> None:
    async with pooled(settings, a={"first_byte_seconds": 0.3}, fallbacks=["tiny"]) as (gateway, a, _):
        a.script = hanging
        assert (await gateway.chat(model="pair")).status_code == 200
        assert len(upstream.chats) == 1


async def test_a_fallbacks_answer_has_the_price_of_what_was_asked_for(
    settings: dict[str, Any], upstream: Scripted
) -> None:
    dear = {"input_fresh": "1000", "input_cached": "1000", "output_text": "1000"}
    async with pooled(settings, price=dear, fallbacks=["tiny"]) as (gateway, a, b):
        a.script = b.script = answering(500)
        assert (await gateway.chat(model="pair")).status_code == 200
        row = await gateway.row()
        assert (row["model"], [x["model"] for x in row["attempts"]]) == ("pair", ["pair", "pair", "pair", "tiny"])
        assert [x["billed"] for x in row["attempts"]][:3] == [0, 0, 0]
        assert row["billed"] == row["attempts"][3]["billed"] == Decimal("0.013")  # 10 + 3 tokens at 1000 a million
        assert len(upstream.chats) == 1


async def test_a_wrong_request_does_not_fall_back(settings: dict[str, Any], upstream: Scripted) -> None:
    async with pooled(settings, fallbacks=["tiny"]) as (gateway, a, _):
        a.script = answering(422)
        assert (await gateway.chat(model="pair")).status_code == 422
        assert upstream.chats == []


async def test_a_parameter_goes_to_who_can_honour_it(settings: dict[str, Any]) -> None:
    async with pooled(settings, a={"kind": "ollama"}) as (gateway, a, b):
        assert (await gateway.chat(model="pair", logit_bias={"5": 1})).status_code == 200
        assert (len(a.chats), len(b.chats)) == (0, 1)
        assert await attempts(gateway) == [(1, "b", "ok", 200)]


async def test_a_parameter_that_nobody_can_honour_is_refused_by_name(settings: dict[str, Any]) -> None:
    async with pooled(settings, a={"kind": "ollama"}, upstreams=["a"]) as (gateway, a, _):
        answer = await gateway.chat(model="pair", logit_bias={"5": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")
        assert a.chats == []


async def test_a_route_may_drop_what_nobody_can_honour_and_names_it(settings: dict[str, Any]) -> None:
    async with pooled(settings, a={"kind": "ollama"}, upstreams=["a"], drop_params=True) as (gateway, a, _):
        answer = await gateway.chat(model="pair", logit_bias={"5": 1}, temperature=0)
        assert (answer.status_code, answer.headers["x-farthing-dropped-params"]) == (200, "logit_bias")
        assert "logit_bias" not in bodies(a)[0] and bodies(a)[0]["temperature"] == 0


async def test_a_stream_that_began_is_not_begun_again_elsewhere(settings: dict[str, Any]) -> None:
    async def dying(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.frame({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]})
        connection.die()

    async with pooled(settings) as (gateway, a, b):
        a.script = dying
        answer = await gateway.chat(model="pair", stream=True)
        assert answer.status_code == 200 and "failed in the middle" in answer.text
        assert b.chats == []


async def test_a_conversation_stays_where_it_began(settings: dict[str, Any]) -> None:
    async with pooled(settings, upstreams=["a", "b"], balance="prefix_affine") as (gateway, a, b):
        for number in range(6):
            messages = [{"role": "user", "content": f"conversation {number} " + "about something " * 60}]
            before = len(a.chats)
            assert (await gateway.chat(model="pair", messages=messages)).status_code == 200
            other = b if len(a.chats) > before else a
            elsewhere = len(other.chats)
            for turn in range(3):
                messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"and {turn}?"}]
                assert (await gateway.chat(model="pair", messages=messages)).status_code == 200
            assert len(other.chats) == elsewhere, "the whole conversation went to one upstream"


async def test_a_gateway_is_ready_as_long_as_every_model_has_an_upstream(settings: dict[str, Any]) -> None:
    async with pooled(settings) as (gateway, a, b):
        await a.stop()
        assert (await gateway.http.get("/health/ready")).status_code == 200
        await b.stop()
        answer = await gateway.http.get("/health/ready")
        assert answer.status_code == 503
        assert set(answer.json()["reasons"]) == {"upstream a", "upstream b"}


async def test_a_prompt_that_is_only_bounded_leaves_the_whole_context_to_the_output(settings: dict[str, Any]) -> None:
    async with pooled(settings, upstreams=["a"], context=100) as (gateway, a, _):
        await limit(gateway, 2000)
        messages = [{"role": "user", "content": "x" * 300}]  # may be 40 tokens or 300: at most 100 fit
        assert (await gateway.chat(model="pair", messages=messages)).status_code == 200
        assert bodies(a)[0]["max_tokens"] == 50, "what is left beside a prompt of 100 at 10 pays 50 at 20"


async def test_an_answer_that_takes_too_long_in_all_is_ended(settings: dict[str, Any]) -> None:
    async with pooled(settings, a={"total_seconds": 0.5}, upstreams=["a"]) as (gateway, a, _):
        a.words, a.pause = ["word "] * 100, 0.05
        started = time.monotonic()
        answer = await gateway.chat(model="pair", stream=True)
        assert answer.status_code == 200 and "it took too long to complete its answer" in answer.text
        assert time.monotonic() - started < 3.0
        assert (await gateway.row())["status"] == "upstream_error"


async def test_each_upstream_gets_its_own_key_and_nothing_of_the_callers(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("sk-of-a\n")
    async with pooled(settings, a={"api_key_file": str(key)}) as (gateway, a, b):
        a.script = answering(503)
        assert (await gateway.chat(model="pair")).status_code == 200
        assert a.chats[0].headers["authorization"] == "Bearer sk-of-a"
        assert "authorization" not in b.chats[0].headers
