"""The dashboard in a real browser: signing in, reading, narrow and dark screens, by keyboard and to a screen reader."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.async_api import Browser, Page, Request, async_playwright, expect
from sqlalchemy.ext.asyncio import AsyncEngine
from visiting import ADMIN_KEY, mount

pytestmark = pytest.mark.browser

CHROMIUM = Path("/usr/bin/chromium")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
async def address(sample_engine: AsyncEngine) -> AsyncIterator[str]:
    """Of the dashboard, served by the server that the product uses."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(mount(sample_engine), log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/dashboard"
    server.should_exit = True
    await serving
    listener.close()


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        await chromium.close()


@asynccontextmanager
async def opened(browser: Browser, address: str, **options: Any) -> AsyncIterator[Page]:
    """A page of a fresh browser profile. Fails when it logs an error, breaks the content policy or goes elsewhere."""
    context = await browser.new_context(**options)
    context.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)  # its own five seconds are few for a chart on a busy machine
    page = await context.new_page()
    wrong: list[str] = []

    def asked(request: Request) -> None:
        if not request.url.startswith(address.removesuffix("/dashboard")):
            wrong.append(f"asked {request.url}")

    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", asked)
    yield page
    await context.close()
    assert wrong == []


async def sign_in(page: Page, address: str) -> None:
    await page.goto(address)
    await page.get_by_label("Admin key").fill(ADMIN_KEY)
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_role("heading", name="Overview", level=1).wait_for()


async def drawn(page: Page) -> None:
    """Wait until all figures are there."""
    await expect(page.locator(".plot .cartesianlayer .subplot")).to_have_count(3)


async def test_sign_in_read_an_operation_and_sign_out(browser: Browser, address: str) -> None:
    async with opened(browser, address, viewport=DESKTOP) as page:
        await sign_in(page, address)
        await drawn(page)
        await page.get_by_role("link", name="The last 100 operations").click()
        rows = page.get_by_role("table", name="The last 100 operations").get_by_role("row")
        assert await rows.count() == 101
        await rows.nth(1).get_by_role("link").click()
        await page.get_by_role("heading", name="Operation", level=1).wait_for()
        for heading in ("Request", "Route", "Attempts"):
            assert await page.get_by_role("heading", name=heading, exact=True, level=2).is_visible()
        await page.get_by_role("button", name="Sign out").click()
        await page.get_by_label("Admin key").wait_for()
        await page.goto(f"{address}/operations")
        assert "/sign-in?next=" in page.url


async def test_a_wrong_key_says_so_and_the_right_one_still_works(browser: Browser, address: str) -> None:
    context = await browser.new_context()
    page = await context.new_page()
    await page.goto(f"{address}/operations")
    await page.get_by_label("Admin key").fill("fa-wrong")
    await page.keyboard.press("Enter")
    alert = page.get_by_role("alert")
    assert await alert.inner_text() == "That is not the admin key."
    field = page.get_by_label("Admin key")
    assert await field.get_attribute("aria-invalid") == "true"
    assert await field.input_value() == ""
    await field.fill(ADMIN_KEY)
    await page.keyboard.press("Enter")
    await page.get_by_role("heading", name="Operations", level=1).wait_for()
    await context.close()


async def test_a_phone_never_scrolls_sideways(browser: Browser, address: str) -> None:
    async with opened(browser, address, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        await sign_in(page, address)
        await drawn(page)
        await fits(page)
        for period in ("Today", "7 days"):
            await page.get_by_role("link", name=period, exact=True).click()
            await drawn(page)
            await fits(page)
            assert await page.get_by_role("columnheader", name=period).is_visible()
            assert not await page.get_by_role("columnheader", name="30 days").is_visible()
        for details in await page.locator("details").all():
            await details.locator("summary").click()
        await fits(page)
        for path in ("usage?by=key", "usage?by=tag%3Aapp", "operations"):
            await page.goto(f"{address}/{path}")
            await fits(page)
        await page.locator("tbody a").first.click()
        await page.get_by_role("heading", name="Attempts").wait_for()
        await fits(page)


async def fits(page: Page) -> None:
    assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["width"], page.url


async def test_a_phone_cuts_no_number_of_the_main_tables(browser: Browser, address: str) -> None:
    cut = (
        "tables => tables.filter(t => t.parentElement.scrollWidth > t.parentElement.clientWidth).map(t => t.className)"
    )
    async with opened(browser, address, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        await page.goto(address)
        word = await page.get_by_text("Farthing", exact=True).bounding_box()
        assert word is not None and word["width"] > 40
        await sign_in(page, address)
        assert await page.locator(".users, .cards, .operations").evaluate_all(cut) == []
        await page.get_by_text("Table: Tokens by class").click()  # six columns: it scrolls, and shows a shadow there
        wide = page.get_by_role("region", name="Tokens by class and day, UTC")
        assert await wide.evaluate("e => e.scrollWidth > e.clientWidth")
        assert "local" in await wide.evaluate("e => getComputedStyle(e).backgroundAttachment")
        await page.goto(f"{address}/operations")
        await page.locator("tr", has=page.locator(".status.ok")).first.get_by_role("link").click()
        latency = page.get_by_role("table", name="Latency parts of each attempt")
        assert await latency.get_by_role("cell").count() == 6
        assert await page.locator(".cards").evaluate_all(cut) == []


async def test_dark_reaches_page_and_charts_and_follows_a_change(browser: Browser, address: str) -> None:
    async with opened(browser, address, viewport=DESKTOP, color_scheme="dark") as page:
        await sign_in(page, address)
        await drawn(page)
        dark = await colours(page)
        await page.emulate_media(color_scheme="light")
        await expect(page.locator(".bars path").first).not_to_have_css("fill", dark[1])
        light = await colours(page)
    assert brightness(dark[0]) < 60 and brightness(light[0]) > 220
    assert dark[1] != light[1]


async def colours(page: Page) -> tuple[str, str]:
    """Of the page's background and of the first bar of the first chart."""
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    bar = await page.evaluate("getComputedStyle(document.querySelector('.bars path')).fill")
    return background, bar


def brightness(rgb: str) -> int:
    return max(int(part) for part in rgb.removeprefix("rgb(").removesuffix(")").split(","))


async def test_the_keyboard_alone_reaches_everything_and_shows_where_it_is(browser: Browser, address: str) -> None:
    async with opened(browser, address, viewport=DESKTOP) as page:
        await page.goto(address)
        await expect(page.get_by_label("Admin key")).to_be_focused()
        await page.keyboard.type(ADMIN_KEY)
        await page.keyboard.press("Enter")
        await page.get_by_role("heading", name="Overview", level=1).wait_for()
        reached = []
        for _ in range(9):
            await page.keyboard.press("Tab")
            name, outline, top = await page.evaluate(
                "(e => [e.innerText.trim(), getComputedStyle(e).outlineStyle, e.getBoundingClientRect().top])"
                "(document.activeElement)"
            )
            assert outline != "none" and top >= 0, f"the focus on {name} cannot be seen"
            reached.append(name)
        assert reached[:6] == ["Skip to the content", "Farthing", "Overview", "Usage", "Operations", "Sign out"]
        assert reached[6:] == ["Today", "7 days", "30 days"]
        await page.goto(address)
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")  # skip
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.innerText") == "Today"
        await page.keyboard.press("Enter")
        await page.wait_for_url("**?period=today")


async def test_a_screen_reader_finds_landmarks_headings_captions_and_charts(browser: Browser, address: str) -> None:
    async with opened(browser, address, viewport=PHONE) as page:  # where tables are laid out as something else
        await sign_in(page, address)
        await drawn(page)
        tree = await page.locator("body").aria_snapshot()
        for part in (
            "- banner:",
            '- navigation "Main":',
            '- navigation "Period":',
            "- main:",
            '- heading "Overview" [level=1]',
            '- heading "Users" [level=2]',
            '- table "Billed, cost and margin of each user in USD',
            '- table "Which model answered, money in USD":',
            '- table "The last 10 operations, newest first, money in USD":',
            '- columnheader "Billed"',
            '- rowheader "amara.okafor',
            'img "Spend by day, USD. Most was billed on',
            'img "Tokens by class, by day.',
        ):
            assert part in tree, f"{part} is not in the accessibility tree:\n{tree}"
        assert await page.evaluate("[...document.querySelectorAll('table')].filter(table => !table.caption)") == []


async def test_the_numbers_are_there_without_scripts(browser: Browser, address: str) -> None:
    async with opened(browser, address, viewport=DESKTOP, java_script_enabled=False) as page:
        await sign_in(page, address)
        assert await page.locator(".plot").first.is_hidden()
        await page.get_by_text("Table: Spend by day, USD").click()
        rows = page.get_by_role("table", name="Spend by day in USD, UTC").get_by_role("row")
        assert await rows.count() == 31
