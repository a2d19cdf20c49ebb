"""Batches as their callers make them, with OpenAI's own client."""

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

from openai import AsyncOpenAI
from openai.types import Batch

from billing.ids import new_id
from billing.people import create_key, create_org
from tests.gateway.running import Gateway

CHAT = "/v1/chat/completions"
ENDED = ("failed", "completed", "expired", "cancelled")


def request(custom_id: str, content: str = "hi", url: str = CHAT, **body: Any) -> dict[str, Any]:
    """One line of an input file."""
    fields: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields | body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


async def start(sdk: AsyncOpenAI, lines: list[Any], endpoint: Any = CHAT, **options: Any) -> Batch:
    file = await sdk.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return await sdk.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


async def eventually(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Wait until `condition` holds; it may be a coroutine function."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)


async def until(sdk: AsyncOpenAI, batch: Batch, *statuses: str, seconds: float = 120) -> Batch:
    """The batch as soon as it has one of `statuses`; by default, as soon as it has ended."""
    async with asyncio.timeout(seconds):
        while True:
            batch = await sdk.batches.retrieve(batch.id)
            if batch.status in (statuses or ENDED):
                return batch
            await asyncio.sleep(0.05)


async def stranger(gateway: Gateway, org: UUID | None = None) -> AsyncOpenAI:
    """Somebody else with a key of their own, in an organisation of their own unless it is given."""
    async with gateway.engine.begin() as connection:
        org = org or await create_org(connection, f"Others {new_id()}")
        key = await create_key(connection, org, "another")
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key.secret, max_retries=0)


async def results(sdk: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none where there is no file."""
    if file_id is None:
        return []
    content = await sdk.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]
