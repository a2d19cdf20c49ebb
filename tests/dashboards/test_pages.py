"""The pages over HTTP, on real PostgreSQL: who may see them, what they say, what they say when something is wrong."""

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import msgspec
import pytest
import structlog
from sample_ledger import PRICES, SMALL, insert_records
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from visiting import ADMIN_KEY, KEY_HASH, ORIGIN, mount, sign_in, visitor

import dashboards.web.site
from billing import people, prices
from billing.forecast import forecast_month
from billing.ids import new_id
from billing.records import AttemptRecord, CachedAnswer, OperationRecord, TokenClasses
from dashboards.web.session import Sessions
from gateway.postgres import embedded_postgres
from migrations import upgrade

PRIVATE = ["/dashboard", "/dashboard/operations", f"/dashboard/operations/{UUID(int=5)}", "/dashboard/no/such/page"]


@pytest.fixture
async def stranger(sample_engine: AsyncEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with visitor(mount(sample_engine)) as client:
        yield client


@pytest.mark.parametrize("path", PRIVATE)
async def test_a_stranger_is_sent_to_the_sign_in(stranger: httpx.AsyncClient, path: str) -> None:
    answer = await stranger.get(path)
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/dashboard/sign-in")
    form = await stranger.get(answer.headers["location"])
    assert form.status_code == 200
    assert f'name="next" value="{path}"' in form.text


async def test_signing_in_goes_on_to_the_page_and_out_ends_it(stranger: httpx.AsyncClient) -> None:
    answer = await sign_in(stranger, next="/dashboard/operations")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/dashboard/operations"
    cookie = answer.headers["set-cookie"]
    for attribute in ("HttpOnly", "SameSite=lax", "Path=/;", "Max-Age=43200"):
        assert attribute in cookie
    assert ADMIN_KEY not in cookie and KEY_HASH.hex() not in cookie
    assert (await stranger.get("/dashboard/operations")).status_code == 200
    assert (await stranger.get("/dashboard/sign-out")).status_code in (404, 405)
    assert (await stranger.post("/dashboard/sign-out")).status_code == 303
    assert (await stranger.get("/dashboard/operations")).status_code == 303


async def test_the_cookie_is_secure_over_https(sample_engine: AsyncEngine) -> None:
    transport = httpx.ASGITransport(mount(sample_engine))
    async with httpx.AsyncClient(transport=transport, base_url="https://farthing.test") as client:
        assert "Secure" in (await sign_in(client)).headers["set-cookie"]


@pytest.mark.parametrize(
    "page",
    ["https://evil.test/", "//evil.test", "/dashboard/../x", "/dashboard//evil.test:80", "/dashboard\\@evil", "/v1"],
)
async def test_signing_in_leads_to_our_own_pages_only(stranger: httpx.AsyncClient, page: str) -> None:
    location = (await sign_in(stranger, next=page)).headers["location"]
    assert httpx.URL(ORIGIN).join(location).host == "farthing.test"
    assert location.startswith("/dashboard") and ".." not in location


async def test_a_wrong_key_is_refused_and_too_many_are_slowed_down(stranger: httpx.AsyncClient) -> None:
    for key in ["", "x" * 2000, "<script>", *["wrong"] * 5]:
        answer = await sign_in(stranger, key)
        assert answer.status_code == 401
        assert 'role="alert"' in answer.text and "set-cookie" not in answer.headers
    slowed = await sign_in(stranger)
    assert slowed.status_code == 429
    assert 0 < int(slowed.headers["retry-after"]) <= 300
    assert "Try again in 5 min" in slowed.text


@pytest.mark.parametrize(
    "headers", [{"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "https://evil.test"}]
)
async def test_forms_of_other_sites_are_refused(operator: httpx.AsyncClient, headers: dict[str, str]) -> None:
    for path in ("/dashboard/sign-in", "/dashboard/sign-out"):
        answer = await operator.post(path, data={"key": ADMIN_KEY}, headers=headers)
        assert answer.status_code == 403
        assert "another site" in answer.text
    assert (await operator.get("/dashboard")).status_code == 200


async def test_our_own_form_is_accepted_behind_either_header(stranger: httpx.AsyncClient) -> None:
    for headers in ({"sec-fetch-site": "same-origin"}, {"origin": ORIGIN}):
        answer = await stranger.post("/dashboard/sign-in", data={"key": ADMIN_KEY}, headers=headers)
        assert answer.status_code == 303


async def test_an_enormous_or_broken_form_is_refused(stranger: httpx.AsyncClient) -> None:
    assert (await sign_in(stranger, "x" * 10_000)).status_code == 413
    assert (await stranger.post("/dashboard/sign-in", content=b"\xff\xfe&&&=;key")).status_code == 401


async def test_every_answer_has_the_strict_headers(operator: httpx.AsyncClient) -> None:
    for path in ["/dashboard", "/dashboard/operations", "/dashboard/nothing", "/dashboard/sign-in"]:
        headers = (await operator.get(path)).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy and "http" not in policy
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"


async def test_the_overview_names_users_models_and_sums(operator: httpx.AsyncClient) -> None:
    page = (await operator.get("/dashboard")).text
    for words in (
        "amara.okafor",
        "李雯",
        "qwen2.5-coder-1.5b",
        "Saved by the prefix cache",
        "unknown for",
        "Today",
        "7 days",
    ):
        assert words in page
    for period in ("today", "7d", "30d"):
        answer = await operator.get("/dashboard", params={"period": period})
        assert answer.status_code == 200
        assert f'?period={period}" aria-current="true"' in answer.text
    assert (await operator.get("/dashboard?period=year")).status_code == 404


async def test_plotly_comes_from_its_wheel_and_files_may_be_kept(stranger: httpx.AsyncClient) -> None:
    for name in ("plotly.js", "farthing.css", "charts.js", "farthing.svg"):
        answer = await stranger.get(f"/dashboard/static/{name}")
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    packed = await stranger.get("/dashboard/static/plotly.js", headers={"accept-encoding": "gzip"})
    plain = await stranger.get("/dashboard/static/plotly.js", headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
    assert packed.content == plain.content
    assert b"plotly.js v" in plain.content[:100]
    assert (await stranger.get("/dashboard/static/../site.py")).status_code in (303, 404)
    assert (await stranger.get("/dashboard/static/site.py")).status_code == 404


async def test_an_empty_ledger_says_what_to_do_first(engine: AsyncEngine) -> None:
    async with visitor(mount(engine)) as client:
        await sign_in(client)
        page = (await client.get("/dashboard")).text
        assert f"curl {ORIGIN}/v1/chat/completions" in page
        assert "None yet" in (await client.get("/dashboard/operations")).text


async def test_only_old_operations_make_a_page_of_zeros_not_an_error(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await insert_records(connection, [await hostile_operation(connection, datetime.now(UTC) - timedelta(days=90))])
    async with visitor(mount(engine)) as client:
        await sign_in(client)
        answer = await client.get("/dashboard")
    assert answer.status_code == 200
    assert "0 operations" in answer.text and "No operation was dispatched" in answer.text


HOSTILE = "<script>alert('x')</script>"


async def hostile_operation(connection: object, at: datetime) -> OperationRecord:
    """Everything that people or upstreams can write is markup; its cost is unknown."""
    org_id = await people.create_org(connection, HOSTILE)
    team_id = await people.create_team(connection, org_id, HOSTILE)
    user_id = await people.create_user(connection, org_id, HOSTILE, team_id)
    key = await people.create_key(connection, org_id, HOSTILE, user_id=user_id)
    return OperationRecord(
        id=new_id(), started_at=at, org_id=org_id, team_id=team_id, user_id=user_id, key_id=key.id,
        tags={HOSTILE: HOSTILE}, requested_model=HOSTILE, model=HOSTILE, route_reasons=[HOSTILE], stream=False,
        status="upstream_error", http_status=502, error=HOSTILE, total_seconds=0.5,
        billed=Decimal("0.0000001"), currency="USD",
        attempts=[
            AttemptRecord(
                number=1, upstream=HOSTILE, model=HOSTILE, started_at=at, status="upstream_error", error=HOSTILE,
                tokens=TokenClasses(input_fresh=3), usage_source="estimated", total_seconds=0.5,
                billed=Decimal("0.0000001"),
            )
        ],
    )  # fmt: skip


async def test_markup_in_names_and_errors_stays_text(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        record = await hostile_operation(connection, datetime.now(UTC))
        await insert_records(connection, [record])
    async with visitor(mount(engine)) as client:
        await sign_in(client)
        for path in ("/dashboard", "/dashboard/operations", f"/dashboard/operations/{record.id}"):
            page = (await client.get(path)).text
            assert "<script>alert" not in page
            assert "&lt;script&gt;alert(&#39;x&#39;)" in page


async def test_an_unknown_cost_is_a_dash_and_a_tiny_charge_is_exact(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        record = await hostile_operation(connection, datetime.now(UTC))
        await insert_records(connection, [record])
    async with visitor(mount(engine)) as client:
        await sign_in(client)
        page = (await client.get(f"/dashboard/operations/{record.id}")).text
        overview = (await client.get("/dashboard")).text
    assert '<data value="0.0000001">0.0000001</data>' in page and "1E-7" not in page + overview
    why = "Unknown: nobody said what &lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; costs on &lt;script&gt;"
    assert f'<abbr class="unknown" title="{why}' in page
    assert ": it names no price." in page
    assert "unknown for 1 operation" in overview
    assert "0.0000001" in overview


def of_an_engine(record: OperationRecord, ttft_seconds: float | None, **more: Any) -> OperationRecord:
    """`record` as a not streamed call to an engine, `more` changed in its attempt."""
    attempt = msgspec.structs.replace(record.attempts[0], ttft_seconds=ttft_seconds, **more)
    return msgspec.structs.replace(record, id=new_id(), model="wren-1b", ttft_seconds=None, attempts=[attempt])


async def test_a_device_price_without_device_time_is_not_called_a_missing_price(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await prices.seed(connection, PRICES)
        cost = (await prices.load(connection)).cost(SMALL, "engine")
        assert cost is not None
        record = of_an_engine(await hostile_operation(connection, datetime.now(UTC)), None, cost_version_id=cost.id)
        await insert_records(connection, [record])
    async with visitor(mount(engine)) as client:
        await sign_in(client)
        page = (await client.get(f"/dashboard/operations/{record.id}")).text
        listed = (await client.get("/dashboard/operations")).text
    assert page.count("Unknown: no device time was reported") == 3  # tile and its note, attempt
    assert "there is no price" not in page + listed
    assert "Unknown: its page says why" in listed


async def test_the_first_token_of_a_whole_answer_is_the_attempts(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        now = datetime.now(UTC)
        record = of_an_engine(
            await hostile_operation(connection, now), 0.123, started_at=now + timedelta(milliseconds=200)
        )
        await insert_records(connection, [record])
    async with visitor(mount(engine)) as client:
        await sign_in(client)
        page = (await client.get(f"/dashboard/operations/{record.id}")).text
        listed = (await client.get("/dashboard/operations")).text
    assert "<dd>323 ms</dd>" in page and "sent with the whole answer" in page
    assert ">323 ms</td>" in listed


async def test_an_answer_from_the_response_cache_says_what_it_saved(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        first = await hostile_operation(connection, datetime.now(UTC))
        cached = CachedAnswer(
            cached_from=first.id, saved_prompt_tokens=190, saved_completion_tokens=120, saved_billed=Decimal("0.0125"),
            saved_cost=Decimal("0.004"), price_version_id=None, price_override_id=None,
        )  # fmt: skip
        again = {"status": "ok", "http_status": 200, "error": None, "attempts": [], "cached": cached}
        record = msgspec.structs.replace(first, id=new_id(), billed=Decimal("0.0025"), cost=Decimal(0), **again)
        await insert_records(connection, [first])
        await insert_records(connection, [record])
    async with visitor(mount(engine)) as client:
        await sign_in(client)
        overview = (await client.get("/dashboard")).text
        page = (await client.get(f"/dashboard/operations/{record.id}")).text
    tile = overview.partition("<dt>Saved by the response cache</dt>")[2].partition("</div>")[0]
    assert '<data value="0.0100">0.010000</data>' in tile and "1 answer given again, 310 tokens not computed" in tile
    assert overview.count("from cache") == 1
    section = page.partition('<section aria-labelledby="cached">')[2].partition("</section>")[0]
    assert f'href="/dashboard/operations/{first.id}"' in section
    for shown in (">190<", ">120<", '<data value="0.0125">', '<data value="0.004">'):
        assert shown in section


async def test_the_month_s_forecast_is_the_shell_s(sample_engine: AsyncEngine, operator: httpx.AsyncClient) -> None:
    page = (await operator.get("/dashboard")).text
    async with sample_engine.connect() as connection:
        [month] = await forecast_month(connection)
    table = page.partition('<caption id="month-caption"')[2].partition("</table>")[0]
    shown = [Decimal(value) for value in re.findall('<data value="([^"]*)"', table)]
    ranges = [getattr(month, name) for name in ("billed", "cost", "margin")]
    assert shown[::4] == [each.so_far for each in ranges]
    for found, expected in zip(shown[1::4], [each.expected for each in ranges], strict=True):
        assert abs(found - expected) <= abs(expected) / 1000  # seconds have passed


async def test_without_a_model_the_list_says_what_was_asked_for(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        record = await hostile_operation(connection, datetime.now(UTC))
        early = {"model": None, "status": "invalid", "http_status": 400, "attempts": []}
        unread = msgspec.structs.replace(record, id=new_id(), requested_model="", **early)
        refused = msgspec.structs.replace(record, id=new_id(), requested_model="auto", **early)
        await insert_records(connection, [unread, refused])
    async with visitor(mount(engine)) as client:
        await sign_in(client)
        listed = (await client.get("/dashboard/operations")).text
        page = (await client.get(f"/dashboard/operations/{unread.id}")).text
    assert "asked for auto" in listed and "via" not in listed
    assert listed.count("turned away before its model was read") == page.count("turned away before its model") == 1


async def test_a_session_needs_the_same_admin_key(sample_engine: AsyncEngine) -> None:
    async with visitor(mount(sample_engine)) as client:
        client.cookies.set(
            "farthing_session", Sessions(b"x" * 32).issue("admin-key"), domain="farthing.test", path="/dashboard"
        )
        assert (await client.get("/dashboard")).status_code == 303


async def test_postgres_away_is_a_503_page_and_back_is_a_page_again(postgres_folder: Path) -> None:
    link = postgres_folder / "away-sockets"  # the folder of the sockets changes with each start, this name does not
    engine = create_async_engine(f"postgresql+asyncpg://postgres@/postgres?host={link}")
    try:
        async with visitor(mount(engine)) as client:
            await sign_in(client)
            await expect(client, 503)  # not started yet
            with embedded_postgres(postgres_folder / "away", {"fsync": "off"}) as url:
                link.symlink_to(url.partition("host=")[2])
                await asyncio.to_thread(upgrade, url)
                await expect(client, 200)
            await expect(client, 503)
            link.unlink()
            with embedded_postgres(postgres_folder / "away", {"fsync": "off"}) as url:
                link.symlink_to(url.partition("host=")[2])
                await expect(client, 200)
    finally:
        await engine.dispose()


async def expect(client: httpx.AsyncClient, status: int) -> None:
    for path in ("/dashboard", "/dashboard/operations", f"/dashboard/operations/{UUID(int=1)}"):
        answer = await client.get(path)
        if status == 503:
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "5"
            assert "PostgreSQL does not answer" in answer.text and "Traceback" not in answer.text
        else:
            assert answer.status_code in (200, 404)


async def test_a_database_that_hangs_is_a_503_too(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboards.web.site, "READ_SECONDS", 0.3)
    async with visitor(mount(engine)) as client, engine.connect() as blocker:
        await sign_in(client)
        await blocker.execute(text("LOCK TABLE operation IN ACCESS EXCLUSIVE MODE"))
        assert (await client.get("/dashboard")).status_code == 503
        await blocker.rollback()
        assert (await client.get("/dashboard")).status_code == 200


async def test_a_defect_is_a_500_page_without_a_trace(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE operation RENAME COLUMN billed TO charged"))
    async with visitor(mount(engine)) as client:
        await sign_in(client)
        with structlog.testing.capture_logs() as logs:
            answer = await client.get("/dashboard")
    assert [line["event"] for line in logs] == ["dashboard_failed"]
    assert answer.status_code == 500
    assert "The gateway" in answer.text and "UndefinedColumn" not in answer.text
