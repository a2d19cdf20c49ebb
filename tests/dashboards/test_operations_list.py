"""The list of operations and where it leads: its pages, and each operation's own."""

import re
from uuid import UUID

import httpx
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.operations import latest_operations


async def test_the_last_hundred_operations_each_have_a_page(
    operator: httpx.AsyncClient, sample_engine: AsyncEngine
) -> None:
    async with sample_engine.connect() as connection:
        latest = await latest_operations(connection, 101)
    listed = (await operator.get("/dashboard/operations")).text
    assert [str(each.id) in listed for each in latest] == [True] * 100 + [False]
    for each in latest[:40]:
        page = await operator.get(f"/dashboard/operations/{each.id}")
        assert page.status_code == 200
        assert str(each.id) in page.text
        attempts = page.text.partition('id="attempts"')[2]
        assert "do not give this amount" not in attempts
        if each.billed and not each.from_cache:
            assert "Sum, as recorded" in attempts


def link(page: str, name: str) -> str | None:
    found = re.search(f'<a href="([^"]+)"[^>]*>{name}</a>', page)
    return found and found[1]


async def test_the_list_goes_on_to_the_oldest_and_back(operator: httpx.AsyncClient, sample_engine: AsyncEngine) -> None:
    async with sample_engine.connect() as connection:
        every = [str(each.id) for each in await latest_operations(connection, 10_000)]
    pages: list[list[str]] = []
    at: str | None = "/dashboard/operations"
    while at is not None:
        page = (await operator.get(at)).text
        pages.append(re.findall(r'/dashboard/operations/([0-9a-f-]{36})"', page))
        assert (link(page, "← Newer") is None) is (len(pages) == 1)
        at = link(page, "Older →")
    assert [identifier for page in pages for identifier in page] == every
    assert {len(page) for page in pages[:-1]} == {100} and "earlier operations" in page
    newer: list[list[str]] = []
    while (at := link(page, "← Newer")) is not None:
        page = (await operator.get(at)).text
        newer.append(re.findall(r'/dashboard/operations/([0-9a-f-]{36})"', page))
    assert newer.pop() == pages[0], "the first page is whole"
    back = [identifier for listed in reversed(newer) for identifier in listed] + pages[-1]
    assert back == every[-len(back) :] and len(back) >= len(every) - 100


@pytest.mark.parametrize(
    ("query", "status"),
    [(f"before={UUID(int=9)}", 404), ("after=x", 400), (f"before={UUID(int=9)}&after={UUID(int=9)}", 400)],
)
async def test_a_list_that_goes_on_from_nowhere_says_so(operator: httpx.AsyncClient, query: str, status: int) -> None:
    answer = await operator.get(f"/dashboard/operations?{query}")
    assert answer.status_code == status and "<h1>" in answer.text


@pytest.mark.parametrize("path", [UUID(int=9), "not-an-id", "%00", "'; drop table operation"])
async def test_an_unknown_operation_is_not_found(operator: httpx.AsyncClient, path: object) -> None:
    answer = await operator.get(f"/dashboard/operations/{path}")
    assert answer.status_code == 404
    assert "<h1>Not found</h1>" in answer.text
