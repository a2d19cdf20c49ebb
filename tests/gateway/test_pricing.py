"""What callers are billed by a running gateway: overrides, tiers, flat parts, prices to come, and the hard cases."""

import asyncio
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from billing.price_changes import Entry, enter
from billing.prices import PriceTerms
from billing.records import TOKEN_CLASSES
from tests.gateway.pooled import until
from tests.gateway.running import Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Scripted
from tests.gateway.test_budgets import limit

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
WRITTEN = {"cache_write_tokens": 12_304}
CLAUDE = {"input_fresh": "3", "input_cached": "0.30", "input_cache_write": "3.75", "output_text": "15"}


async def put(gateway: Gateway, at: datetime | None = None, **fields: Any) -> None:
    terms = PriceTerms(**{"book": "sale", "model": "tiny", "currency": "USD"} | fields)
    async with gateway.engine.begin() as connection:
        await enter(connection, [Entry(terms=terms, effective_at=at)])


def all_classes(amount: int) -> dict[str, Decimal]:
    return dict.fromkeys(TOKEN_CLASSES, Decimal(amount))


async def billed(gateway: Gateway, count: int = 1) -> Decimal:
    rows = await gateway.rows(count)
    amount: Decimal = rows[-1]["billed"] * 1_000_000
    return amount


async def asked(gateway: Gateway, count: int, **changes: Any) -> Decimal:
    """Millionths that a call is billed, the `count`th."""
    assert (await gateway.chat(**changes)).status_code == 200
    return await billed(gateway, count)


def reporting(usage: dict[str, Any], **fields: Any) -> Any:
    """A hosted upstream that answers one word, streamed or whole, and reports `usage`."""

    async def script(request: Request, connection: Connection) -> None:
        if request.body.get("stream"):
            await connection.start()
            await connection.frame({"choices": [{"index": 0, "delta": {"content": "word"}}]} | fields)
            await connection.frame({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]} | fields)
            await connection.frame({"choices": [], "usage": usage} | fields)
            await connection.done()
        else:
            choice = {"index": 0, "message": {"content": "word"}, "finish_reason": "stop"}
            await connection.json({"choices": [choice], "usage": usage} | fields)

    return script


async def test_an_override_is_used_as_soon_as_it_is_entered_and_frozen_in_the_attempt(gateway: Gateway) -> None:
    plain = await asked(gateway, 1)
    key = str(gateway.people.key)
    await put(gateway, model="", tier="", scope_kind="key", scope_id=key, factor=Decimal("0.5"))
    await gateway.heard()
    assert await asked(gateway, 2) == plain / 2
    first, second = (row["attempts"][0] for row in await gateway.rows(2))
    assert first["price_override_id"] is None and second["price_override_id"] is not None
    assert first["price_version_id"] == second["price_version_id"]
    await put(gateway, tier="", scope_kind="team", scope_id=str(gateway.people.team), **all_classes(0))
    await put(gateway, model="", tier="", scope_kind="key", scope_id=key)
    await gateway.heard()
    assert await asked(gateway, 3) == 0, "the key's has ended, and the team has a price of its own"


async def test_a_price_to_come_takes_effect_by_itself(gateway: Gateway) -> None:
    before = await asked(gateway, 1)
    begins = datetime.now(UTC) + timedelta(seconds=4)
    await put(gateway, begins, **all_classes(1000))
    assert await asked(gateway, 2) == before
    await asyncio.sleep((begins - datetime.now(UTC)).total_seconds() + 0.3)
    assert await asked(gateway, 3) == 13 * 1000


async def test_parts_for_the_request_and_its_images(settings: dict[str, Any], upstream: Scripted) -> None:
    hosted = settings["models"]["hosted"]
    hosted["price"] = hosted["price"] | {"per_request": "0.01", "per_image": "0.002"}
    upstream.script = reporting({"prompt_tokens": 10, "completion_tokens": 1})
    async with running_gateway(settings) as gateway:
        text = {"type": "text", "text": "What is this?"}
        messages = [{"role": "user", "content": [text, PICTURE, PICTURE]}]
        assert await asked(gateway, 1, model="hosted", messages=messages) == 100 + 20 + 10_000 + 4_000
        (attempt,) = (await gateway.row())["attempts"]
        assert (attempt["images"], attempt["cost"]) == (2, Decimal("0.00012"))


async def test_a_part_for_the_request_counts_against_a_budget_before_it_is_made(settings: dict[str, Any]) -> None:
    settings["models"]["tiny"]["price"] = settings["models"]["tiny"]["price"] | {"per_request": "0.01"}
    async with running_gateway(settings) as gateway:
        await limit(gateway, 10_000 + 100 + 20 * 3)
        assert (await gateway.chat(max_tokens=4)).status_code == 402
        assert (await gateway.chat(max_tokens=3)).status_code == 200


async def test_priority_without_a_price_is_refused_by_its_name(gateway: Gateway, upstream: Scripted) -> None:
    answer = await gateway.chat(service_tier="priority")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "service_tier")
    assert "'tiny' has no price for priority" in error["message"]
    assert not upstream.chats and (await gateway.row())["status"] == "invalid"


async def test_priority_of_an_unpriced_model_is_served_and_unknown(gateway: Gateway, upstream: Scripted) -> None:
    assert (await gateway.chat(model="gratis", service_tier="priority")).status_code == 200
    assert upstream.chats[0].body["priority"] < 0
    row = await gateway.row()
    assert (row["billed"], row["attempts"][0]["tier"]) == (None, "priority")


async def test_priority_is_billed_and_asked_of_an_engine_in_its_words(
    settings: dict[str, Any], upstream: Scripted
) -> None:
    settings["models"]["tiny"]["priority_price"] = {"input_fresh": "20", "input_cached": "2", "output_text": "40"}
    async with running_gateway(settings) as gateway:
        plain = await asked(gateway, 1)
        assert await asked(gateway, 2, service_tier="priority") == 2 * plain
        first, second = upstream.chats
        assert "priority" not in first.body
        assert second.body["priority"] < 0 and "service_tier" not in second.body
        assert [row["attempts"][0]["tier"] for row in await gateway.rows(2)] == ["standard", "priority"]


@pytest.mark.parametrize(("served", "price"), [("priority", 100), ("default", 10)])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_upstream_served_is_billed_whatever_was_asked(
    settings: dict[str, Any], upstream: Scripted, stream: bool, served: str, price: int
) -> None:
    settings["models"]["hosted"]["priority_price"] = {"input_fresh": "100", "output_text": "0"}
    settings["models"]["hosted"]["price"] = {"input_fresh": "10", "output_text": "0"}
    upstream.script = reporting({"prompt_tokens": 10, "completion_tokens": 1}, service_tier=served)
    async with running_gateway(settings) as gateway:
        assert await asked(gateway, 1, model="hosted", service_tier="priority", stream=stream) == 10 * price
        assert upstream.chats[0].body["service_tier"] == "priority"
        (attempt,) = (await gateway.row())["attempts"]
        known = attempt["cost"] is not None
        assert known == (served == "default"), "what priority costs there nobody said"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("usage", "amount", "completion"),
    [
        (
            {"prompt_tokens": 12_307, "completion_tokens": 550, "prompt_tokens_details": WRITTEN},
            "0.054399",
            550,
        ),
        (
            {
                "prompt_tokens": 1000,
                "completion_tokens": 0,
                "prompt_tokens_details": {"cache_write_tokens": 700, "cached_tokens": 200},
            },
            "0.002985",
            0,
        ),
        ({"prompt_tokens": 0, "completion_tokens": 136, "completion_tokens_details": {"reasoning_tokens": 31}},
         "0.00204", 136),
    ],
)  # fmt: skip
async def test_the_same_usage_streamed_and_not_is_the_same_to_the_last_digit(
    settings: dict[str, Any], upstream: Scripted, usage: dict[str, Any], amount: str, completion: int, stream: bool
) -> None:
    settings["models"]["hosted"]["price"] = CLAUDE
    upstream.script = reporting(usage)
    async with running_gateway(settings) as gateway:
        assert (await gateway.chat(model="hosted", stream=stream)).status_code == 200
        row = await gateway.row()
        (attempt,) = row["attempts"]
        assert (row["billed"], attempt["billed"]) == (Decimal(amount), Decimal(amount))
        assert attempt["output_text"] + attempt["output_reasoning"] == completion


async def test_reasoning_that_is_reported_apart_is_billed_with_the_rest(
    settings: dict[str, Any], upstream: Scripted
) -> None:
    settings["upstreams"]["hosted"]["usage"] = {"reasoning": "beside"}
    details = {"reasoning_tokens": 1_935}
    upstream.script = reporting(
        {"prompt_tokens": 0, "completion_tokens": 1_015, "completion_tokens_details": details, "total_tokens": 2_950}
    )
    async with running_gateway(settings) as gateway:
        assert await asked(gateway, 1, model="hosted") == 2_950 * 20


async def test_an_upstream_that_fails_and_reported_nothing_is_not_charged(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.frame({"choices": [{"index": 0, "delta": {"content": "word" * 10}}]})
        connection.die()

    upstream.script = script
    await gateway.chat(model="hosted", stream=True)
    row = await gateway.row()
    (attempt,) = row["attempts"]
    assert (row["status"], row["billed"], attempt["billed"], attempt["billable"]) == ("upstream_error", 0, 0, False)
    assert (attempt["output_text"], attempt["usage_source"]) == (10, "estimated"), "for the reader"


async def test_a_caller_who_leaves_a_hosted_upstream_before_its_first_byte(
    gateway: Gateway, upstream: Scripted
) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.left()

    upstream.script = script
    messages = [{"role": "user", "content": "x" * 400}]
    asking = asyncio.create_task(gateway.chat(model="hosted", messages=messages))
    await until(lambda: upstream.chats)
    asking.cancel()
    row = await gateway.row()
    (attempt,) = row["attempts"]
    assert (row["status"], attempt["usage_source"], attempt["output_text"]) == ("client_closed", "estimated", 0)
    assert row["billed"] * 1_000_000 == attempt["input_fresh"] * 10 > 0, "the prompt, which may have been computed"


async def test_a_free_model_passes_an_exhausted_budget_and_an_unpriced_one_does_not(
    settings: dict[str, Any], upstream: Scripted
) -> None:
    settings["models"]["big"]["price"] = {"input_fresh": "0", "input_cached": "0", "output_text": "0"}
    async with running_gateway(settings) as gateway:
        await limit(gateway, 0)
        assert (await gateway.chat(model="tiny")).status_code == 402
        assert (await gateway.chat(model="gratis")).json()["error"]["code"] == "unpriced_model"
        assert (await gateway.chat(model="big")).status_code == 200
        assert [row["billed"] for row in await gateway.rows(3)] == [0, 0, 0]
