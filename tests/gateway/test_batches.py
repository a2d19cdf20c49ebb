"""`/v1/batches` with OpenAI's own client against a gateway on a real socket, with a scripted upstream behind it."""

import asyncio
from collections import Counter
from decimal import Decimal
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, ConflictError, NotFoundError
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import create_async_engine

from billing.budgets import set_budget
from billing.people import revoke_key
from billing.tables import batch_line, operation, price_version
from gateway.settings import Settings
from tests.gateway.batching import CHAT, eventually, jsonl, request, results, start, stranger, until
from tests.gateway.running import Gateway, running_gateway, serving
from tests.gateway.scripted import Connection, Request, Scripted


def content_of(request: Request) -> str:
    return str(request.body["messages"][0]["content"])


async def test_two_hundred_lines_there_and_back(gateway: Gateway, upstream: Scripted) -> None:
    async def script(request: Request, connection: Connection) -> None:
        if "wrong" in content_of(request):
            await connection.json({"error": {"message": "no,\nnot that", "type": "invalid_request_error"}}, 400)
        else:
            await upstream.chat(request, connection)

    upstream.script = script
    sdk = gateway.sdk
    lines = [request(f"request {n} é", "wrong" if n % 20 == 7 else f"tell me {n}") for n in range(200)]
    made = await start(sdk, lines, metadata={"night": "1"})
    assert (made.object, made.status, made.completion_window) == ("batch", "validating", "24h")
    assert made.metadata == {"night": "1"}
    assert made.expires_at == made.created_at + 24 * 3600
    ended = await until(sdk, made)
    assert ended.status == "completed" and ended.errors is None and ended.model == "tiny"
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 200, "completed": 190, "failed": 10}
    assert ended.usage is not None
    assert (ended.usage.input_tokens, ended.usage.output_tokens, ended.usage.total_tokens) == (1900, 570, 2470)
    assert ended.usage.input_tokens_details.cached_tokens == 760
    assert ended.in_progress_at and ended.finalizing_at and ended.completed_at and not ended.cancelled_at
    good, wrong = await results(sdk, ended.output_file_id), await results(sdk, ended.error_file_id)
    order = [line["custom_id"] for line in lines]
    assert [line["custom_id"] for line in good] == [order[n] for n in range(200) if n % 20 != 7]
    assert [line["custom_id"] for line in wrong] == [order[n] for n in range(200) if n % 20 == 7]
    assert {line["response"]["status_code"] for line in good} == {200}
    assert good[0]["response"]["body"]["choices"][0]["message"]["content"] == "Hello world"
    assert all(line["error"] is None and line["id"].startswith("batch_req_") for line in good + wrong)
    assert wrong[0]["response"]["status_code"] == 400
    assert wrong[0]["response"]["body"]["error"]["message"] == "no,\nnot that"
    rows = await gateway.rows(200)
    assert {row["tags"]["batch"] for row in rows} == {made.id}
    assert {str(row["id"]) for row in rows} == {line["response"]["request_id"] for line in good + wrong}
    output = await sdk.files.retrieve(ended.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{made.id}_output.jsonl")
    assert (await sdk.batches.list()).data[0].id == made.id
    async with gateway.engine.connect() as connection:
        left = (await connection.execute(select(func.count()).select_from(batch_line))).scalar_one()
    assert left == 0, "the result is in the files"


async def test_every_other_endpoint(gateway: Gateway) -> None:
    """What the scripted upstream answers does not matter here: the line reached the endpoint's own path."""
    for endpoint, body in (
        ("/v1/completions", {"model": "tiny", "prompt": "hi"}),
        ("/v1/embeddings", {"model": "tiny", "input": "hi"}),
        ("/v1/responses", {"model": "tiny", "input": "hi"}),
    ):
        line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
        ended = await until(gateway.sdk, await start(gateway.sdk, [line], endpoint))
        assert ended.status == "completed", ended
    apis = [row["api"] for row in await gateway.rows(3)]
    assert apis == ["completions", "embeddings", "responses"]


async def test_what_is_wrong_with_lines_is_listed_with_their_numbers(gateway: Gateway, upstream: Scripted) -> None:
    lines = [
        request("a"),
        b'{"custom_id": "b", ',
        b"",
        request("a"),
        request("c") | {"method": "GET"},
        request("d", url="/v1/embeddings"),
        {"custom_id": "e", "method": "POST", "url": CHAT},
        request("f") | {"body": [1]},
        request("g", stream=True),
        request("h") | {"extra": 1},
        request(""),
        request("i") | {"custom_id": 7},
        b'{"custom_id": "\xff"}',
    ]
    ended = await until(gateway.sdk, await start(gateway.sdk, lines))
    assert ended.status == "failed" and ended.failed_at and ended.output_file_id is None
    assert ended.errors is not None and ended.errors.object == "list"
    assert [(error.line, error.code, error.param) for error in ended.errors.data or []] == [
        (2, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "invalid_method", "method"),
        (6, "mismatched_url", "url"),
        (7, "missing_required_parameter", "body"),
        (8, "invalid_json_line", "body"),
        (9, "invalid_stream", "body.stream"),
        (10, "unknown_parameter", "extra"),
        (11, "invalid_custom_id", "custom_id"),
        (12, "invalid_type", "custom_id"),
        (13, "invalid_json_line", None),
    ]
    assert "line 1" in (ended.errors.data or [])[1].message  # type: ignore[operator]
    assert upstream.chats == [], "a batch with one bad line runs not at all"


async def test_an_empty_file_fails(gateway: Gateway) -> None:
    ended = await until(gateway.sdk, await start(gateway.sdk, [b"", b"  "]))
    assert ended.status == "failed"
    assert ended.errors is not None and [error.code for error in ended.errors.data or []] == ["empty_file"]


async def test_what_cannot_be_a_batch_is_refused(gateway: Gateway) -> None:
    sdk = gateway.sdk
    file = await sdk.files.create(file=("in.jsonl", jsonl([request("a")])), purpose="batch")
    good: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    for change, words in (
        ({"endpoint": "/v1/moderations"}, "`endpoint` must be one of /v1/chat/completions, /v1/completions"),
        ({"completion_window": "1h"}, '`completion_window` must be "24h"'),
        ({"metadata": {"a": "x" * 513}}, "`metadata` may have up to 16 pairs"),
        ({"metadata": {"a": "\0"}}, "none with a NUL"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "`output_expires_after.seconds`"),
        ({"extra_body": {"colour": "red"}}, "unknown field `colour`"),
    ):
        with pytest.raises(BadRequestError, match=words):
            await sdk.batches.create(**(good | change))
    with pytest.raises(NotFoundError, match="There is no file"):
        await sdk.batches.create(**(good | {"input_file_id": "file-" + "0" * 32}))
    with pytest.raises(NotFoundError, match="There is no batch"):
        await sdk.batches.retrieve("batch_7")


async def test_output_files_expire_when_the_batch_says(gateway: Gateway) -> None:
    made = await start(gateway.sdk, [request("a")], output_expires_after={"anchor": "created_at", "seconds": 3600})
    ended = await until(gateway.sdk, made)
    output = await gateway.sdk.files.retrieve(ended.output_file_id or "")
    assert output.expires_at == output.created_at + 3600


async def test_lines_run_by_length_and_after_everybody_else(settings: dict[str, Any], upstream: Scripted) -> None:
    settings["limits"] = {"batch_lines": 1}
    lengths = [300, 20, 4000, 100, 900, 50, 2000]
    async with running_gateway(settings) as gateway:
        lines = [request(str(length), "x" * length) for length in lengths]
        await until(gateway.sdk, await start(gateway.sdk, [*lines, request("own", "x", priority=-5)]))
        seen = [(len(content_of(chat)), chat.body["priority"]) for chat in upstream.chats]
        assert seen == [(length, 100) for length in [1, *sorted(lengths)]]
        upstream.requests.clear()
        await until(gateway.sdk, await start(gateway.sdk, [request("a", model="hosted")]))
        assert [chat.body["model"] for chat in upstream.chats] == ["vendor-1"]
        assert "priority" not in upstream.chats[0].body, "only an engine of ours knows it"
        upstream.requests.clear()
        await gateway.chat()
        assert "priority" not in upstream.chats[0].body


async def test_lines_are_billed_at_the_batch_price(settings: dict[str, Any]) -> None:
    half = {"input_fresh": "5", "input_cached": "0.5", "output_text": "10"}
    settings["models"]["tiny"]["batch_price"] = half
    async with running_gateway(settings) as gateway:
        await until(gateway.sdk, await start(gateway.sdk, [request("a"), request("b", model="big")]))
        await gateway.chat()
        rows = {(row["model"], "batch" in row["tags"]): row for row in await gateway.rows(3)}
        async with gateway.engine.connect() as connection:
            tiers = {row.id: row.tier for row in await connection.execute(select(price_version))}
        assert {
            which: (row["billed"], tiers[row["attempts"][0]["price_version_id"]]) for which, row in rows.items()
        } == {
            ("tiny", True): (Decimal("0.000062"), "batch"),
            ("big", True): (Decimal("0.000124"), "standard"),
            ("tiny", False): (Decimal("0.000124"), "standard"),
        }


async def test_a_cancelled_batch_keeps_what_it_has(settings: dict[str, Any], upstream: Scripted) -> None:
    settings["limits"] = {"batch_lines": 2}
    go_on = asyncio.Event()

    async def script(request: Request, connection: Connection) -> None:
        if len(upstream.chats) > 3:
            await go_on.wait()
        await upstream.chat(request, connection)

    upstream.script = script
    async with running_gateway(settings) as gateway:
        sdk = gateway.sdk
        made = await start(sdk, [request(str(n)) for n in range(20)])
        await eventually(lambda: len(upstream.chats) == 5)
        assert (await sdk.batches.cancel(made.id)).status == "cancelling"
        assert (await sdk.batches.cancel(made.id)).status == "cancelling", "once more changes nothing"
        go_on.set()
        ended = await until(sdk, made)
        assert ended.status == "cancelled" and ended.cancelling_at and ended.cancelled_at
        done, rest = await results(sdk, ended.output_file_id), await results(sdk, ended.error_file_id)
        assert len(done) == len(upstream.chats) == 5, "what was under way was finished, nothing was begun"
        assert {(line["error"]["code"], line["response"]) for line in rest} == {("batch_cancelled", None)}
        assert sorted(int(line["custom_id"]) for line in done + rest) == list(range(20))
        assert ended.request_counts is not None
        assert (ended.request_counts.completed, ended.request_counts.failed) == (5, 15)
        with pytest.raises(ConflictError, match="its status is cancelled"):
            await sdk.batches.cancel(made.id)


async def test_lines_left_when_the_window_ends(settings: dict[str, Any], upstream: Scripted) -> None:
    async def busy(request: Request, connection: Connection) -> None:
        await connection.json({"error": {"message": "busy"}}, 429, "retry-after: 1\r\n")

    upstream.script = busy
    settings["models"]["tiny"]["retries"] = 0
    async with running_gateway(settings) as gateway:
        made = await start(gateway.sdk, [request("a"), request("b")])
        await eventually(lambda: len(upstream.chats) == 2)
        async with gateway.engine.begin() as connection:
            await connection.execute(text("UPDATE batch SET expires_at = now()"))
        ended = await until(gateway.sdk, made)
        assert ended.status == "expired" and ended.expired_at
        rest = await results(gateway.sdk, ended.error_file_id)
        assert [line["error"]["code"] for line in rest] == ["batch_expired"] * 2


async def test_a_busy_upstream_is_asked_again(settings: dict[str, Any], upstream: Scripted) -> None:
    refusals = Counter[str]()

    async def script(request: Request, connection: Connection) -> None:
        content = content_of(request)
        if content == "busy" and refusals[content] < 2:
            refusals[content] += 1
            await connection.json({"error": {"message": "later"}}, 429, "retry-after: 1\r\n")
        else:
            await upstream.chat(request, connection)

    upstream.script = script
    settings["models"]["tiny"]["retries"] = 0
    async with running_gateway(settings) as gateway:
        ended = await until(gateway.sdk, await start(gateway.sdk, [request("a", "busy"), request("b")]))
        assert ended.status == "completed"
        assert [line["custom_id"] for line in await results(gateway.sdk, ended.output_file_id)] == ["a", "b"]
        assert refusals["busy"] == 2
        assert sorted(row["http_status"] for row in await gateway.rows(4)) == [200, 200, 429, 429]


async def test_a_broken_upstream_is_asked_three_times(settings: dict[str, Any], upstream: Scripted) -> None:
    async def script(request: Request, connection: Connection) -> None:
        await connection.json({"error": {"message": "broken"}}, 500)

    upstream.script = script
    settings["models"]["tiny"]["retries"] = 0
    async with running_gateway(settings) as gateway:
        ended = await until(gateway.sdk, await start(gateway.sdk, [request("a")]))
        (line,) = await results(gateway.sdk, ended.error_file_id)
        assert line["response"]["status_code"] == 502 and len(upstream.chats) == 3


async def test_a_gateway_that_stops_gives_its_lines_back(settings: dict[str, Any], upstream: Scripted) -> None:
    stopped = asyncio.Event()

    async def script(request: Request, connection: Connection) -> None:
        if not stopped.is_set():
            await stopped.wait()
        await upstream.chat(request, connection)

    upstream.script = script
    async with running_gateway(settings) as gateway:
        made = await start(gateway.sdk, [request("a"), request("b")])
        await eventually(lambda: len(upstream.chats) == 2)
    stopped.set()
    engine = create_async_engine(settings["database_url"])
    async with engine.connect() as connection:
        query = select(batch_line.c.tries, batch_line.c.claimed_by, batch_line.c.output)
        assert (await connection.execute(query)).all() == [(0, None, None)] * 2
    upstream.requests.clear()
    async with serving(Settings(**settings)) as (url, _):
        sdk = AsyncOpenAI(base_url=f"{url}/v1", api_key=gateway.people.secret, max_retries=0)
        ended = await until(sdk, made)
        assert ended.request_counts is not None and ended.request_counts.completed == 2
        assert len(upstream.chats) == 2
    async with engine.connect() as connection:
        rows = (await connection.execute(select(operation.c.status, operation.c.billed))).all()
    await engine.dispose()
    assert sorted(row.status for row in rows) == ["ok", "ok", "upstream_error", "upstream_error"]
    assert sum(row.billed for row in rows) == Decimal("0.000248"), "what was cut off is not charged"


async def test_a_revoked_key_stops_its_batches(settings: dict[str, Any], upstream: Scripted) -> None:
    settings["limits"] = {"batch_lines": 1}
    go_on = asyncio.Event()

    async def script(request: Request, connection: Connection) -> None:
        await go_on.wait()
        await upstream.chat(request, connection)

    upstream.script = script
    async with running_gateway(settings) as gateway:
        made = await start(gateway.sdk, [request(str(n)) for n in range(10)])
        await eventually(lambda: upstream.chats)
        async with gateway.engine.begin() as connection:
            await revoke_key(connection, gateway.people.key)
        go_on.set()
        sdk = await stranger(gateway, gateway.people.org)
        ended = await until(sdk, made)
        done, refused = await results(sdk, ended.output_file_id), await results(sdk, ended.error_file_id)
        assert len(done) == 1 and len(refused) == 9 and len(upstream.chats) == 1
        assert {line["response"]["status_code"] for line in refused} == {401}
        assert "has been revoked" in refused[0]["response"]["body"]["error"]["message"]


async def test_a_budget_refuses_lines(gateway: Gateway) -> None:
    """Two lines' worth is left: what follows is refused, and is a line of the error file."""
    async with gateway.engine.begin() as connection:
        await set_budget(connection, "key", str(gateway.people.key), "none", Decimal("0.0003"), currency="USD")
    lines = [request(str(n), max_tokens=3) for n in range(10)]
    ended = await until(gateway.sdk, await start(gateway.sdk, lines))
    done, refused = await results(gateway.sdk, ended.output_file_id), await results(gateway.sdk, ended.error_file_id)
    assert len(done) + len(refused) == 10 and 1 <= len(done) <= 2
    assert {line["response"]["status_code"] for line in refused} == {402}
    assert {line["response"]["body"]["error"]["type"] for line in refused} == {"insufficient_quota"}


async def test_organisations_do_not_see_each_other(gateway: Gateway) -> None:
    other = await stranger(gateway)
    made = await until(gateway.sdk, await start(gateway.sdk, [request("a")]))
    assert (await other.batches.list()).data == [] and (await other.files.list()).data == []
    for attempt in (
        other.batches.retrieve(made.id),
        other.batches.cancel(made.id),
        other.files.retrieve(made.input_file_id),
        other.files.content(made.output_file_id or ""),
        other.files.delete(made.input_file_id),
        other.batches.create(input_file_id=made.input_file_id, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(NotFoundError):
            await attempt
    assert (await gateway.sdk.files.retrieve(made.input_file_id)).id == made.input_file_id


async def test_an_input_file_deleted_at_once_is_read_all_the_same(gateway: Gateway) -> None:
    made = await start(gateway.sdk, [request(str(n)) for n in range(30)])
    await gateway.sdk.files.delete(made.input_file_id)
    with pytest.raises(NotFoundError):
        await gateway.sdk.files.retrieve(made.input_file_id)
    ended = await until(gateway.sdk, made)
    assert ended.request_counts is not None and ended.request_counts.completed == 30


async def test_pages_of_batches(gateway: Gateway) -> None:
    made = [(await start(gateway.sdk, [request("a")])).id for _ in range(5)]
    first = await gateway.sdk.batches.list(limit=2)
    assert [batch.id for batch in first.data] == made[:2:-1] and first.has_more
    assert [batch.id async for batch in gateway.sdk.batches.list(limit=2)] == made[::-1]
    for limit in (0, 101):
        with pytest.raises(BadRequestError, match="`limit` must be a number from 1 to 100"):
            await gateway.sdk.batches.list(limit=limit)
