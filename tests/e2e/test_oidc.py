"""Signing in through an OIDC provider as people do: `farthing up`, a provider on another site, a real browser."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import pytest
from joserfc.jwk import RSAKey
from playwright.async_api import BrowserContext, Page, async_playwright, expect
from scripted_provider import CLIENT, SECRET, ScriptedProvider, scripted_provider
from stack import FARTHING, Stack, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.browser]

SECTION = """
[oidc]
issuer = "{issuer}"
client_id = "{client}"
client_secret_file = "{secret}"
public_url = "http://127.0.0.1:{port}"
role_claim = "groups"
roles = {{ finance = "billing_reader" }}
"""
PEOPLE = {
    "Ada": {"sub": "ada", "email": "ada@example.com", "email_verified": True, "name": "Ada Lovelace"},
    "Bea": {"sub": "bea", "email": "bea@example.com", "email_verified": True, "groups": ["finance"]},
    "Eve": {"sub": "eve", "email": "eve@example.com", "email_verified": True},
}


@pytest.fixture(scope="module")
def there() -> Iterator[ScriptedProvider]:
    """On localhost, which to a browser is another site than 127.0.0.1: what our cookies must stand."""
    with scripted_provider("localhost") as provider:
        provider.key = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
        provider.people = PEOPLE
        yield provider


@pytest.fixture(scope="module")
def farthing(there: ScriptedProvider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Ada is its administrator; a claim of Bea's gives her a role; Eve is nobody here."""
    data_dir, port = tmp_path_factory.mktemp("oidc") / "data", free_port()
    data_dir.mkdir()
    secret = data_dir / "oidc-secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    starter = (files("gateway") / "starter.toml").read_text()
    section = SECTION.format(issuer=there.url, client=CLIENT, secret=secret, port=port)
    (data_dir / "farthing.toml").write_text(starter + section)
    there.callback = f"http://127.0.0.1:{port}/dashboard/sign-in/callback"
    stack = Stack(data_dir, "--no-engine", port=port)
    try:
        stack.wait_until_up()
        create = [
            FARTHING,
            "admins",
            "create",
            "Ada",
            "--role",
            "admin",
            "--email",
            "Ada@Example.com",
            "--data-dir",
            data_dir,
        ]
        subprocess.run(create, check=True, capture_output=True)
        yield stack
    finally:
        stack.stop()


@asynccontextmanager
async def browsing() -> AsyncIterator[tuple[BrowserContext, Page]]:
    """A page of a fresh profile. Fails when it breaks the content policy or logs another error than an answer's."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=Path("/usr/bin/chromium"), args=["--no-sandbox"])
        context = await browser.new_context()
        context.set_default_timeout(20_000)
        page = await context.new_page()
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        yield context, page
        await browser.close()
        assert [each for each in wrong if "the server responded with a status of 4" not in each] == []


async def choose(page: Page, who: str) -> None:
    await page.get_by_role("link", name="Sign in with localhost").click()
    await page.wait_for_url("http://localhost:*/**")
    await page.get_by_role("button", name=who).click()
    await page.wait_for_url("http://127.0.0.1:*/**")


async def test_people_sign_in_see_who_they_are_and_sign_out(farthing: Stack) -> None:
    address = farthing.file.dashboard_url
    async with browsing() as (context, page):
        await page.goto(f"{address}/operations")
        await choose(page, "I am Ada")
        assert page.url == f"{address}/operations", "on to the page that was asked for"
        await page.get_by_role("heading", name="Operations", level=1).wait_for()
        banner = page.get_by_role("banner")
        await expect(banner.locator(".who")).to_have_text("Signed in as ada@example.com admin")
        assert {each["name"] for each in await context.cookies()} == {"farthing_session"}
        assert await page.evaluate("document.cookie") == ""
        await page.reload()
        await expect(banner.locator(".who")).to_contain_text("ada@example.com")
        await page.get_by_role("button", name="Sign out").click()
        await page.get_by_role("link", name="Sign in with localhost").wait_for()
        assert await context.cookies() == []
        await page.goto(address)
        assert "/sign-in" in page.url
        await choose(page, "I am Bea")
        await expect(banner.locator(".who")).to_have_text("Signed in as bea@example.com billing reader")
        await page.get_by_role("button", name="Sign out").click()
        await page.get_by_label("Admin key").fill(farthing.file.admin_key)
        await page.keyboard.press("Enter")
        await expect(banner.locator(".who")).to_have_text("Signed in as admin key owner")


async def test_whom_nobody_knows_and_who_changes_their_mind_stay_outside(farthing: Stack) -> None:
    async with browsing() as (context, page):
        await page.goto(farthing.file.dashboard_url)
        for who, why in (
            ("I am Eve", "You are not an administrator here. Ask an owner to add your e-mail address."),
            ("Cancel", "Signing in with the provider failed: the provider refused: 'access_denied'."),
        ):
            await choose(page, who)
            await expect(page.get_by_role("alert")).to_have_text(why)
            assert "farthing_session" not in {each["name"] for each in await context.cookies()}
        await choose(page, "I am Ada")
        await page.get_by_role("button", name="Sign out").wait_for()


async def test_an_answer_to_another_sign_in_is_not_taken(farthing: Stack, there: ScriptedProvider) -> None:
    """As when somebody gets another one to open the address that ended their own sign-in."""
    address = farthing.file.dashboard_url
    async with browsing() as (context, page):
        there.answer = {"state": "somebody-else's"}
        try:
            await page.goto(address)
            await choose(page, "I am Ada")
        finally:
            there.answer = {}
        await expect(page.get_by_role("alert")).to_contain_text("the answer belongs to another sign-in")
        await context.clear_cookies()
        await page.goto(f"{address}/sign-in/callback?code=1&state=2")
        await expect(page.get_by_role("alert")).to_contain_text("began in another browser")
        assert await context.cookies() == []
