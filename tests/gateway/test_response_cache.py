"""The response cache at a running gateway: what is given again, to whom, for how long, and what is not kept."""

import asyncio
from decimal import Decimal
from typing import Any

import httpx
import pytest

from billing.people import create_key, create_org
from billing.restrictions import Restrictions
from tests.gateway.pooled import answering, pooled
from tests.gateway.running import CHAT, Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Scripted, frame
from tests.gateway.test_budgets import limit, settled
from tests.gateway.test_limits import limit as rate_limit
from tests.gateway.vendors import anthropic_upstream, with_claude

ON = {"seconds": 60}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT | {"max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    for model in settings["models"].values():
        model["response_cache"] = ON
    return settings


def outcome(answer: httpx.Response) -> str | None:
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-farthing-cache")


async def outcomes(gateway: Gateway, *requests: dict[str, Any]) -> list[str | None]:
    return [outcome(await gateway.chat(**each)) for each in requests]


async def test_a_hit_is_the_same_answer_without_tokens_or_an_attempt(gateway: Gateway, upstream: Scripted) -> None:
    first, second = await gateway.chat(), await gateway.chat()
    assert (outcome(first), outcome(second)) == ("miss", "hit")
    assert second.content == first.content and len(upstream.chats) == 1
    assert second.headers["age"] == "0" and "age" not in first.headers
    assert second.headers["x-farthing-trace-id"] != first.headers["x-farthing-trace-id"]
    assert (second.headers["x-farthing-cost"], second.headers["x-farthing-cached-tokens"]) == ("0", "0")
    made, hit = await gateway.rows(2)
    assert (hit["status"], hit["http_status"], hit["finish_reason"]) == ("ok", 200, "stop")
    assert (hit["attempts"], hit["billed"], hit["cost"]) == ([], 0, 0)
    assert hit["cached_from"] == made["id"] and "response_cache" in hit["route_reasons"]
    (attempt,) = made["attempts"]
    assert (hit["saved_prompt_tokens"], hit["saved_completion_tokens"]) == (10, attempt["output_text"])
    assert (hit["saved_billed"], hit["saved_cost"]) == (made["billed"], made["cost"])
    assert hit["price_version_id"] == attempt["price_version_id"]
    assert made["cached_from"] is None and made["saved_billed"] is None
    metrics = (await gateway.http.get("/metrics")).text
    assert 'farthing_response_cache_lookups_total{outcome="hit"} 1.0' in metrics
    assert 'farthing_operations_total{model="tiny",status="ok"} 2.0' in metrics


async def test_without_the_setting_every_request_is_computed(settings: dict[str, Any], upstream: Scripted) -> None:
    del settings["models"]["tiny"]["response_cache"]
    async with running_gateway(settings) as gateway:
        assert await outcomes(gateway, {}, {}) == [None, None] and len(upstream.chats) == 2


@pytest.mark.parametrize("model", ["hosted", "claude"])
async def test_each_dialect_is_answered_in_its_own_words_whole_and_streamed(
    settings: dict[str, Any], upstream: Scripted, model: str
) -> None:
    """By an upstream that speaks OpenAI's dialect, and by one that speaks Anthropic's."""
    upstream.paths["/v1/messages"] = anthropic_upstream
    with_claude(settings)["models"]["claude"]["response_cache"] = ON
    async with running_gateway(settings) as gateway:
        for path, body in BODIES.items():
            for stream in (False, True):
                asked = body | {"model": model, "stream": stream}
                first, second = [await gateway.http.post(path, json=asked) for _ in range(2)]
                assert (outcome(first), outcome(second)) == ("miss", "hit")
                assert second.content == first.content
                assert second.headers["content-type"] == first.headers["content-type"]
                assert ("data: " in second.text) == stream
        rows = await gateway.rows(12)
        assert [bool(row["attempts"]) for row in rows] == [True, False] * 6
        assert all(row["saved_completion_tokens"] > 0 for row in rows[1::2])
        assert [row["stream"] for row in rows[1::2]] == [False, True] * 3


async def test_the_vendors_clients_read_a_hit(gateway: Gateway) -> None:
    async with gateway.sdk as sdk:
        asked: dict[str, Any] = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        for _ in range(2):
            chunks = [chunk async for chunk in await sdk.chat.completions.create(**asked)]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello world"
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
    assert [row["cached_from"] is None for row in await gateway.rows(2)] == [True, False]


async def test_embeddings_are_given_again(settings: dict[str, Any], upstream: Scripted) -> None:
    async def script(request: Request, connection: Connection) -> None:
        vector = {"object": "embedding", "index": 0, "embedding": [0.5]}
        await connection.json({"object": "list", "data": [vector], "usage": {"prompt_tokens": 4, "total_tokens": 4}})

    upstream.paths["/v1/embeddings"] = script
    async with running_gateway(settings) as gateway:
        for wanted in ("miss", "hit"):
            answer = await gateway.http.post("/v1/embeddings", json={"model": "hosted", "input": "a"})
            assert outcome(answer) == wanted and answer.json()["data"][0]["embedding"] == [0.5]
        assert (await gateway.rows(2))[1]["saved_prompt_tokens"] == 4


async def test_equal_bodies_in_other_words_and_bodies_that_only_look_alike(gateway: Gateway) -> None:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"temperature":1}'
    for same in (
        body,
        b'{ "temperature":1, "messages":[{"content":"\\u0061","role":"user"}], "model":"tiny", "user":"somebody"}',
    ):
        assert outcome(await gateway.send(same)) == ("miss" if same is body else "hit")
    for other in (body.replace(b":1}", b":1.0}"), body.replace(b'"a"', b'"a","content":"a"'), body[:-1] + b',"n":1}'):
        assert outcome(await gateway.send(other)) == "miss"


async def test_cache_control_of_a_request(gateway: Gateway, upstream: Scripted) -> None:
    async def asked(control: str) -> str | None:
        headers = {"cache-control": control}
        return outcome(await gateway.http.post("/v1/chat/completions", json=CHAT, headers=headers))

    assert await asked("no-store") == "bypass"
    assert await asked("private") == "miss", "nothing was kept"
    assert await asked("private") == "hit"
    assert await asked("No-Cache") == "bypass"
    assert await asked("max-age=0, private") == "miss"
    assert await asked("max-age=60") == "hit"
    assert len(upstream.chats) == 4


async def test_what_is_asked_anew_takes_the_place_of_what_was_kept(gateway: Gateway, upstream: Scripted) -> None:
    await gateway.chat()
    upstream.words = ["Good", "bye"]
    await gateway.http.post("/v1/chat/completions", json=CHAT, headers={"cache-control": "no-cache"})
    answer = await gateway.chat()
    assert outcome(answer) == "hit" and answer.json()["choices"][0]["message"]["content"] == "Goodbye"


async def test_an_answer_is_given_again_only_for_so_long(settings: dict[str, Any]) -> None:
    settings["models"]["tiny"]["response_cache"] = {"seconds": 1.5}
    async with running_gateway(settings) as gateway:
        assert await outcomes(gateway, {}, {}) == ["miss", "hit"]
        await asyncio.sleep(1.6)
        assert await outcomes(gateway, {}) == ["miss"]


async def test_another_organisation_never_gets_an_answer_and_a_colleague_does(gateway: Gateway) -> None:
    async with gateway.engine.begin() as connection:
        other = await create_key(connection, await create_org(connection, "Others"), "theirs")
        colleague = await create_key(connection, gateway.people.org, "mine")
    assert outcome(await gateway.chat()) == "miss"
    for secret, wanted in ((other.secret, "miss"), (colleague.secret, "hit"), (other.secret, "hit")):
        headers = {"authorization": f"Bearer {secret}"}
        assert outcome(await gateway.http.post("/v1/chat/completions", json=CHAT, headers=headers)) == wanted


@pytest.mark.parametrize(("shared_by", "teamless", "teammate"), [("team", "miss", "hit"), ("key", "miss", "miss")])
async def test_a_narrower_group(settings: dict[str, Any], shared_by: str, teamless: str, teammate: str) -> None:
    settings["models"]["tiny"]["response_cache"] = ON | {"shared_by": shared_by}
    async with running_gateway(settings) as gateway:
        async with gateway.engine.begin() as connection:
            apart = await create_key(connection, gateway.people.org, "no team")
            near = await create_key(connection, gateway.people.org, "team", team_id=gateway.people.team)
        assert outcome(await gateway.chat()) == "miss"
        for secret, wanted in ((apart.secret, teamless), (near.secret, teammate)):
            headers = {"authorization": f"Bearer {secret}"}
            assert outcome(await gateway.http.post("/v1/chat/completions", json=CHAT, headers=headers)) == wanted


async def unfinished(request: Request, connection: Connection) -> None:
    await connection.start()
    await connection.frame(frame({"content": "half"}, 1))
    connection.die()


async def aborted(request: Request, connection: Connection) -> None:
    choice = {"index": 0, "message": {"content": "half"}, "finish_reason": "abort"}
    await connection.json({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})


@pytest.mark.parametrize(
    ("script", "stream"), [(answering(400), False), (answering(500), False), (unfinished, True), (aborted, False)]
)
async def test_what_did_not_end_well_is_not_kept(
    gateway: Gateway, upstream: Scripted, script: Any, stream: bool
) -> None:
    upstream.script = script
    await gateway.chat(model="hosted", stream=stream)
    upstream.script = None
    assert await outcomes(gateway, *[{"model": "hosted", "stream": stream}] * 2) == ["miss", "hit"]


async def test_an_answer_that_a_budget_cut_short_is_not_kept(gateway: Gateway, upstream: Scripted) -> None:
    """The caller set no limit, and its budget pays for three tokens; the colleague has a budget of its own."""

    async def cut_short(request: Request, connection: Connection) -> None:
        reason = "stop" if request.body.get("max_tokens") is None else "length"
        choice = {"index": 0, "message": {"content": "a"}, "finish_reason": reason}
        await connection.json({"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 1}})

    upstream.script = cut_short
    await limit(gateway, 100 + 3 * 20)
    assert (await gateway.chat()).json()["choices"][0]["finish_reason"] == "length"
    async with gateway.engine.begin() as connection:
        colleague = await create_key(connection, gateway.people.org, "mine")
    headers = {"authorization": f"Bearer {colleague.secret}"}
    answer = await gateway.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert outcome(answer) == "miss" and answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_what_a_fallback_answered_is_not_kept(settings: dict[str, Any]) -> None:
    more = {"response_cache": ON, "fallbacks": ["gratis"], "retries": 0}
    async with pooled(settings, **more) as (gateway, first, second):
        first.script = second.script = answering(500)
        assert await outcomes(gateway, {"model": "pair"}, {"model": "pair"}) == ["miss", "miss"]
        first.script = second.script = None
        assert await outcomes(gateway, {"model": "pair"}, {"model": "pair"}) == ["miss", "hit"]


async def test_an_answer_too_large_for_the_cache_is_not_kept(settings: dict[str, Any], upstream: Scripted) -> None:
    settings["limits"] = {"response_cache_bytes": 40_000}
    upstream.words = ["x" * 6_000]
    async with running_gateway(settings) as gateway:
        assert await outcomes(gateway, {}, {}) == ["miss", "miss"]
        upstream.words = ["x"]
        assert await outcomes(gateway, {}, {}) == ["miss", "hit"]


async def test_a_free_hit_passes_an_exhausted_budget(gateway: Gateway) -> None:
    assert outcome(await gateway.chat(max_tokens=5)) == "miss"
    await limit(gateway, 0)
    assert (await gateway.chat(max_tokens=6)).status_code == 402
    assert outcome(await gateway.chat(max_tokens=5)) == "hit"
    assert await settled(gateway, 3) == 0


async def test_a_priced_hit_is_billed_exactly_and_never_above_a_budget(settings: dict[str, Any]) -> None:
    tiny = settings["models"]["tiny"]
    tiny["price"] = tiny["price"] | {"per_cached_answer": "0.0000123"}
    async with running_gateway(settings) as gateway:
        assert outcome(await gateway.chat()) == "miss"
        await limit(gateway, 40)  # 3 hits, 12.3 millionths each
        answers = await asyncio.gather(*(gateway.chat() for _ in range(12)))
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [402] * 9
        hits = [answer for answer in answers if answer.status_code == 200]
        assert {answer.headers["x-farthing-cost"] for answer in hits} == {"0.0000123"}
        assert await settled(gateway, 13) == Decimal("36.9")
        billed = [row["billed"] for row in await gateway.rows(13) if row["cached_from"] is not None]
        assert billed == [Decimal("0.0000123")] * 3


async def test_a_hit_of_an_unpriced_model_is_unknown_and_refused_under_a_hard_budget(gateway: Gateway) -> None:
    assert await outcomes(gateway, {"model": "gratis"}, {"model": "gratis"}) == ["miss", "hit"]
    assert (await gateway.rows(2))[1]["billed"] is None
    await limit(gateway, 1_000)
    answer = await gateway.chat(model="gratis")
    assert (answer.status_code, answer.json()["error"]["code"]) == (402, "unpriced_model")


async def test_a_hit_counts_in_limits_of_requests_and_not_in_limits_of_tokens(gateway: Gateway) -> None:
    assert outcome(await gateway.chat(max_tokens=5)) == "miss"
    await rate_limit(gateway, 1, "tokens")
    await rate_limit(gateway, 2, "requests")
    assert [(await gateway.chat(max_tokens=5)).status_code for _ in range(3)] == [200, 200, 429]


async def test_a_key_that_may_not_use_the_model_gets_no_hit(gateway: Gateway) -> None:
    await gateway.chat()
    async with gateway.engine.begin() as connection:
        only_big = Restrictions(models=frozenset({"big"}))
        key = await create_key(connection, gateway.people.org, "narrow", restrictions=only_big)
    answer = await gateway.http.post(
        "/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key.secret}"}
    )
    assert answer.status_code == 403 and "x-farthing-cache" not in answer.headers


async def test_many_at_once(gateway: Gateway, upstream: Scripted) -> None:
    """Those that come before there is an answer are computed; each has its row."""
    bodies = [{"seed": n % 4, "stream": n % 2 == 1} for n in range(16)]
    first = await asyncio.gather(*(gateway.chat(**body) for body in bodies))
    again = await asyncio.gather(*(gateway.chat(**body) for body in bodies))
    assert {outcome(answer) for answer in again} == {"hit"}
    assert len(upstream.chats) == [outcome(answer) for answer in first].count("miss")
    rows = await gateway.rows(32)
    assert sum(row["cached_from"] is not None for row in rows) == 32 - len(upstream.chats)
    made = {row["id"] for row in rows if row["cached_from"] is None}
    assert all(row["cached_from"] in made for row in rows if row["cached_from"] is not None)
