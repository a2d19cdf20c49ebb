"""Signing in through an OIDC provider: who is let in, and what is not believed."""

import asyncio
import base64
import hmac
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from joserfc.jwk import ECKey
from scripted_provider import CALLBACK, CLIENT, SECRET, ScriptedProvider, scripted_provider
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine
from visiting import mount, visitor

from billing import people
from billing.administrators import change_role, create_administrator, get_administrator, revoke_administrator
from billing.tables import administrator, audit_log
from dashboards.web import COOKIE, Provider, ProviderSettings
from dashboards.web.sign_in import ATTEMPT_COOKIE


@pytest.fixture
def there() -> Iterator[ScriptedProvider]:
    with scripted_provider() as provider:
        yield provider


def settings(there: ScriptedProvider, **changes: Any) -> ProviderSettings:
    usual = {"issuer": there.url, "client_id": CLIENT, "client_secret": SECRET, "redirect_uri": CALLBACK}
    return ProviderSettings(**(usual | changes))


@pytest.fixture
async def browser(engine: AsyncEngine, there: ScriptedProvider) -> AsyncIterator[httpx.AsyncClient]:
    async with visitor(mount(engine, Provider(settings(there)))) as client:
        yield client


async def go_there(browser: httpx.AsyncClient, page: str = "/dashboard/operations") -> str:
    """Begin to sign in, as far as the address that the provider sends the browser back to."""
    away = await browser.get("/dashboard/sign-in/provider", params={"next": page})
    assert away.status_code == 303, away.text
    async with httpx.AsyncClient(trust_env=False) as elsewhere:
        back = await elsewhere.get(away.headers["location"])
    assert back.status_code == 302
    return back.headers["location"]


async def sign_in(browser: httpx.AsyncClient) -> httpx.Response:
    return await browser.get(await go_there(browser))


async def invite(engine: AsyncEngine, email: str = "ada@example.com", role: Any = "admin") -> str:
    async with engine.begin() as conn:
        return str(await create_administrator(conn, "Ada", role, email=email))


async def test_who_was_added_is_let_in_and_bound(
    browser: httpx.AsyncClient, engine: AsyncEngine, there: ScriptedProvider
) -> None:
    who = await invite(engine)
    page = await browser.get("/dashboard/sign-in?next=/dashboard/operations")
    assert "Sign in with 127.0.0.1" in page.text and "next=%2Fdashboard%2Foperations" in page.text
    answer = await sign_in(browser)
    assert answer.status_code == 303 and answer.headers["location"] == "/dashboard/operations", answer.text
    cookies = answer.headers.get_list("set-cookie")
    assert all("HttpOnly" in each and "samesite=lax" in each.lower() for each in cookies)
    assert (await browser.get("/dashboard/operations")).status_code == 200
    async with engine.connect() as conn:
        row = (await conn.execute(select(administrator))).one()
        log = (await conn.execute(select(audit_log).order_by(audit_log.c.id.desc()))).first()
    assert (row.issuer, row.subject) == (there.url, "ada-1")
    assert log is not None and log.actor == "oidc:ada@example.com" and log.noun_id == who
    there.person = {"sub": "ada-1", "email": "ada.lovelace@example.com", "email_verified": True}
    assert (await sign_in(browser)).status_code == 303, "whoever is bound is known by subject, whatever the address"


async def test_who_was_not_added_stays_outside(browser: httpx.AsyncClient, there: ScriptedProvider) -> None:
    answer = await sign_in(browser)
    assert answer.status_code == 403 and "You are not an administrator here" in answer.text
    assert COOKIE not in browser.cookies
    assert SECRET not in answer.text


async def test_an_address_that_was_not_verified_is_nobody_s(
    browser: httpx.AsyncClient, engine: AsyncEngine, there: ScriptedProvider
) -> None:
    await invite(engine)
    for verified in (False, None, "false"):
        there.person = {"sub": "eve", "email": "ada@example.com"} | (
            {} if verified is None else {"email_verified": verified}
        )
        assert (await sign_in(browser)).status_code == 403
    assert COOKIE not in browser.cookies


async def test_an_address_is_bound_once(
    browser: httpx.AsyncClient, engine: AsyncEngine, there: ScriptedProvider
) -> None:
    await invite(engine)
    assert (await sign_in(browser)).status_code == 303
    there.person = {"sub": "eve", "email": "ada@example.com", "email_verified": True}
    assert (await sign_in(browser)).status_code == 403


async def test_a_session_ends_when_its_administrator_is_revoked_and_they_do_not_come_back(
    browser: httpx.AsyncClient, engine: AsyncEngine
) -> None:
    who = await invite(engine)
    assert (await sign_in(browser)).status_code == 303
    assert (await browser.get("/dashboard/operations")).status_code == 200
    async with engine.begin() as conn:
        await revoke_administrator(conn, (await get_administrator(conn, who)).id)
    assert (await browser.get("/dashboard/operations")).status_code == 303
    answer = await sign_in(browser)
    assert answer.status_code == 403 and "no longer" in answer.text


async def test_a_member_sees_only_their_own(
    sample_engine: AsyncEngine, there: ScriptedProvider, operator: httpx.AsyncClient
) -> None:
    """The sample ledger has several users; what the member sees is a part of what the operator sees."""
    async with sample_engine.connect() as conn:
        found = await people.list_keys(conn)
    mine = next(key for key in found if key.user_id is not None)
    async with sample_engine.begin() as conn:
        await create_administrator(conn, "M", "member", email="ada@example.com", user_id=mine.user_id)
    async with visitor(mount(sample_engine, Provider(settings(there)))) as member:
        assert (await sign_in(member)).status_code == 303
        own = await member.get("/dashboard")
        assert own.status_code == 200
        others = {key.user for key in found if key.user not in (None, mine.user)}
        assert others and not [name for name in others if f">{name}<" in own.text]
        everything = (await operator.get("/dashboard/operations")).text
        assert mine.user is not None
        ids = [part.partition('"')[0] for part in everything.split("/dashboard/operations/")[1:]]
        pages = [await member.get(f"/dashboard/operations/{each}") for each in ids[:30]]
        assert {page.status_code for page in pages} == {200, 404}
        theirs = [own, await member.get("/dashboard/operations"), *(page for page in pages if page.status_code == 200)]
        for page in theirs:
            assert "Billed" in page.text
            assert not re.search("[Cc]ost|Margin", page.text), "what it cost the operator is not theirs"


async def test_domains_roles_and_userinfo(engine: AsyncEngine, there: ScriptedProvider) -> None:
    changes = {
        "allowed_domains": frozenset({"example.com"}),
        "role_claim": "groups",
        "roles": {"finance": "billing_reader", "platform": "admin"},
    }
    async with visitor(mount(engine, Provider(settings(there, **changes)))) as browser:
        there.person = {"sub": "1", "email": "a@evil.com", "email_verified": True, "groups": ["platform"]}
        assert "not of a domain" in (await sign_in(browser)).text
        there.person = {"sub": "2", "groups": ["finance", "platform", "chess"]}
        there.userinfo = {"sub": "2", "email": "b@example.com", "email_verified": True, "name": "Bea"}
        assert (await sign_in(browser)).status_code == 303
        there.userinfo = {"sub": "1", "email": "b@example.com", "email_verified": True}
        assert (await sign_in(browser)).status_code == 502
        there.person = {"sub": "2", "email": "b@example.com", "email_verified": True, "groups": ["finance"]}
        assert (await sign_in(browser)).status_code == 303
        there.person = {"sub": "3", "email": "c@example.com", "email_verified": True, "groups": ["chess"]}
        assert (await sign_in(browser)).status_code == 403
    async with engine.connect() as conn:
        bea = await get_administrator(conn, "b@example.com")
    assert (bea.name, bea.role) == ("Bea", "billing_reader"), "the last sign-in's claim counts"


CLAIMED = {"role_claim": "groups", "roles": {"finance": "billing_reader", "platform": "admin"}}
ADA = {"email": "ada@example.com", "email_verified": True}


async def test_who_has_a_role_by_a_claim_is_out_without_it(engine: AsyncEngine, there: ScriptedProvider) -> None:
    async with visitor(mount(engine, Provider(settings(there, **CLAIMED)))) as browser:
        there.person = {"sub": "1", **ADA, "groups": ["platform"]}
        assert (await sign_in(browser)).status_code == 303
        for groups in ({}, {"groups": []}, {"groups": "chess"}, {"groups": {"platform": True}}):
            there.person = {"sub": "1", **ADA, **groups}
            answer = await sign_in(browser)
            assert answer.status_code == 403 and "no role here any more" in answer.text, groups
        async with engine.begin() as conn:
            await change_role(conn, (await get_administrator(conn, "ada@example.com")).id, "billing_reader")
        assert (await sign_in(browser)).status_code == 303, "an owner has given the role"


async def test_who_was_added_by_hand_needs_no_claim(engine: AsyncEngine, there: ScriptedProvider) -> None:
    await invite(engine)
    async with visitor(mount(engine, Provider(settings(there, **CLAIMED)))) as browser:
        for groups in ({}, {"groups": ["platform"]}, {}):
            there.person = {"sub": "1", **ADA, **groups}
            assert (await sign_in(browser)).status_code == 303, groups


async def test_who_was_revoked_before_the_first_sign_in_is_not_made_anew_by_a_claim(
    engine: AsyncEngine, there: ScriptedProvider
) -> None:
    who = await invite(engine)
    async with engine.begin() as conn:
        await revoke_administrator(conn, (await get_administrator(conn, who)).id)
    there.person = {"sub": "1", **ADA, "groups": ["platform"]}
    async with visitor(mount(engine, Provider(settings(there, **CLAIMED)))) as browser:
        answer = await sign_in(browser)
        assert answer.status_code == 403 and "no longer" in answer.text
        await invite(engine)
        assert (await sign_in(browser)).status_code == 303, "unless an owner adds them again"


@pytest.mark.parametrize("address", ["\u212aate@example.com", "kate@example.com\n", ["kate@example.com"]])
async def test_an_address_that_only_looks_the_same_is_another(
    browser: httpx.AsyncClient, engine: AsyncEngine, there: ScriptedProvider, address: Any
) -> None:
    """The Kelvin sign's lower case is a k."""
    await invite(engine, "Kate@Example.com")
    there.person = {"sub": "eve", "email": address, "email_verified": True}
    assert (await sign_in(browser)).status_code == 403
    there.person = {"sub": "kate", "email": "KATE@example.COM", "email_verified": True}
    assert (await sign_in(browser)).status_code == 303


async def test_a_verification_is_of_the_address_beside_it(
    browser: httpx.AsyncClient, engine: AsyncEngine, there: ScriptedProvider
) -> None:
    await invite(engine)
    there.person = {"sub": "eve", "email_verified": True}
    there.userinfo = {"sub": "eve", "email": "ada@example.com"}
    assert (await sign_in(browser)).status_code == 403


async def test_cookies_are_secure_where_browsers_come_over_https(engine: AsyncEngine, there: ScriptedProvider) -> None:
    public = settings(there, redirect_uri="https://farthing.test/dashboard/sign-in/callback")
    async with visitor(mount(engine, Provider(public))) as browser:
        away = await browser.get("/dashboard/sign-in/provider")
    assert "secure" in away.headers["set-cookie"].lower()


def encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def token(header: dict[str, Any], claims: dict[str, Any], secret: bytes | None = None) -> str:
    """A token made by hand: unsigned, or signed with what everybody may know."""
    signed = ".".join(encoded(json.dumps(part).encode()) for part in (header, claims))
    return f"{signed}." + ("" if secret is None else encoded(hmac.digest(secret, signed.encode(), "sha256")))


ATTACKS: dict[str, Any] = {
    "another nonce": {"nonce": "replayed"},
    "no nonce": {"nonce": None},
    "another audience": {"aud": "somebody-else"},
    "several audiences, issued to another": {"aud": [CLIENT, "somebody-else"], "azp": "somebody-else"},
    "several audiences, issued to nobody": {"aud": [CLIENT, "somebody-else"]},
    "another issuer": {"iss": "https://evil.test"},
    "expired": {"exp": int(time.time()) - 120},
    "never ends": {"exp": None},
    "from the future": {"iat": int(time.time()) + 86_400},  # of when this file was read
    "not valid yet": {"nbf": int(time.time()) + 86_400},
    "nobody": {"sub": ""},
    "nobody that could be stored": {"sub": "a\x00b"},
    "issued to another": {"azp": "somebody-else"},
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_claims_that_are_not_for_this_sign_in(
    browser: httpx.AsyncClient, engine: AsyncEngine, there: ScriptedProvider, attack: str
) -> None:
    await invite(engine)

    def change(claims: dict[str, Any]) -> None:
        claims |= ATTACKS[attack]
        for name in [name for name, value in claims.items() if value is None]:
            del claims[name]

    there.change = change
    answer = await sign_in(browser)
    assert answer.status_code == 502 and COOKIE not in browser.cookies, answer.text


async def test_a_minute_of_skew_is_forgiven(
    browser: httpx.AsyncClient, engine: AsyncEngine, there: ScriptedProvider
) -> None:
    await invite(engine)
    now = int(time.time())
    there.change = lambda claims: claims.update(exp=now - 30, iat=now + 30)
    assert (await sign_in(browser)).status_code == 303


@pytest.mark.parametrize("attack", ["none", "hmac", "other key", "garbage", "nothing"])
async def test_signatures_that_are_none(
    browser: httpx.AsyncClient, engine: AsyncEngine, there: ScriptedProvider, attack: str
) -> None:
    await invite(engine)
    stranger = ECKey.generate_key("P-256", {"kid": "one"})
    known = there.key.as_pem(private=False)
    signatures: dict[str, Any] = {
        "none": lambda claims: token({"alg": "none"}, claims),
        "hmac": lambda claims: token({"alg": "HS256", "kid": "one"}, claims, known),
        "other key": lambda claims: there.signed(claims, stranger),
        "garbage": lambda claims: "a.b.c",
        "nothing": lambda claims: "",
    }
    there.sign = signatures[attack]
    for _ in range(3):
        answer = await sign_in(browser)
        assert answer.status_code == 502 and COOKIE not in browser.cookies
    assert there.asked_for_keys <= 2, "a forger does not make us ask the provider again and again"


async def test_new_keys_are_found(engine: AsyncEngine, there: ScriptedProvider) -> None:
    await invite(engine)
    now = [time.time()]
    async with visitor(mount(engine, Provider(settings(there), clock=lambda: now[0]))) as browser:
        assert (await sign_in(browser)).status_code == 303
        there.key = ECKey.generate_key("P-256", {"kid": "two", "use": "sig"})
        now[0] += 45
        assert (await sign_in(browser)).status_code == 303


async def test_another_state_or_browser_or_provider(
    browser: httpx.AsyncClient, engine: AsyncEngine, there: ScriptedProvider
) -> None:
    await invite(engine)
    for answer in ({"state": "forged"}, {"iss": "https://evil.test"}, {"error": "access_denied"}):
        there.answer = answer
        assert (await sign_in(browser)).status_code == 403, answer
    there.answer = {}
    back = await go_there(browser)
    kept = browser.cookies.pop(ATTEMPT_COOKIE) if ATTEMPT_COOKIE in browser.cookies else None
    assert kept is not None
    assert (await browser.get(back)).status_code == 401, "no cookie: it began elsewhere"
    assert (await browser.get(back, headers={"cookie": f"{ATTEMPT_COOKIE}={kept}0"})).status_code == 401
    assert COOKIE not in browser.cookies
    assert (await browser.get(back, headers={"cookie": f"{ATTEMPT_COOKIE}={kept}"})).status_code == 303
    query = parse_qs(urlsplit(back).query)
    assert (await browser.get(back, headers={"cookie": f"{ATTEMPT_COOKIE}={kept}"})).status_code == 502, (
        f"a second use of {query}"
    )


async def test_a_code_is_not_taken_with_another_verifier(
    browser: httpx.AsyncClient, engine: AsyncEngine, there: ScriptedProvider
) -> None:
    """A stolen code, brought in through the thief's own sign-in."""
    await invite(engine)
    stolen = parse_qs(urlsplit(await go_there(browser)).query)["code"][0]
    there.answer = {"code": stolen}
    assert (await sign_in(browser)).status_code == 502


async def test_a_provider_that_is_away_or_another_than_it_says(engine: AsyncEngine, there: ScriptedProvider) -> None:
    for issuer in ("http://127.0.0.1:1", there.url + "/"):
        async with visitor(mount(engine, Provider(settings(there, issuer=issuer)))) as browser:
            answer = await browser.get("/dashboard/sign-in/provider")
            assert answer.status_code == 502 and "Signing in with the provider failed" in answer.text
            assert "Admin key" in answer.text, "the other way in is still offered"


async def test_a_flood_of_answers_does_not_reach_the_provider(engine: AsyncEngine, there: ScriptedProvider) -> None:
    await invite(engine)
    app = mount(engine, Provider(settings(there)))
    async with visitor(app) as flood, visitor(app, "10.0.0.9") as browser:
        back = httpx.URL(await go_there(flood))
        forged = back.copy_merge_params({"code": "guessed"})
        answers = await asyncio.gather(*(flood.get(forged) for _ in range(50)))
        assert Counter(each.status_code for each in answers) == {502: 20, 429: 30}
        assert len(there.codes_brought) == 20
        slowed = next(each for each in answers if each.status_code == 429)
        assert 0 < int(slowed.headers["retry-after"]) <= 60 and "Too many failed attempts" in slowed.text
        for page in (back, "/dashboard/sign-in/provider"):
            assert (await flood.get(page)).status_code == 429
        for _ in range(21):
            assert (await sign_in(browser)).status_code == 303, "who is let in is never slowed down"
    assert len(there.codes_brought) == 41


async def test_a_provider_that_is_away_is_not_asked_by_a_flood(engine: AsyncEngine, there: ScriptedProvider) -> None:
    async with visitor(mount(engine, Provider(settings(there, issuer="http://127.0.0.1:1")))) as flood:
        answers = [await flood.get("/dashboard/sign-in/provider") for _ in range(21)]
    assert Counter(each.status_code for each in answers) == {502: 20, 429: 1}


async def test_without_a_provider_there_is_no_such_page(engine: AsyncEngine) -> None:
    async with visitor(mount(engine)) as browser:
        assert (await browser.get("/dashboard/sign-in/provider")).status_code == 404
        assert "Sign in with" not in (await browser.get("/dashboard/sign-in")).text


@pytest.mark.parametrize("page", ["https://evil.test", "//evil.test", "/dashboard/../admin", "/dashboard?x=//evil"])
async def test_nobody_is_led_elsewhere(browser: httpx.AsyncClient, engine: AsyncEngine, page: str) -> None:
    await invite(engine)
    assert (await browser.get(await go_there(browser, page))).headers["location"] == "/dashboard"
