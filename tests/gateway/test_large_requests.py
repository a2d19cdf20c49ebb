"""The largest requests: an image of 30 MB, 200 tools, a conversation of 1,000 turns. All of it goes upstream."""

from typing import Any

import pytest

from tests.gateway.running import Gateway
from tests.gateway.scripted import Scripted

IMAGE = "A" * (30 * 1024 * 1024)
URL = f"data:image/png;base64,{IMAGE}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TURNS = [{"role": ("user", "assistant")[turn % 2], "content": f"turn {turn} " + "word " * 50} for turn in range(1001)]
NAMES = [f"tool_{number}" for number in range(200)]


def pictured(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


PICTURES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": pictured({"type": "image_url", "image_url": {"url": URL}})},
    "messages": {
        "messages": pictured({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE}})
    },
    "responses": {"input": pictured({"type": "input_image", "image_url": URL})},
}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": TURNS},
    "messages": {"messages": TURNS},
    "responses": {"input": TURNS},
}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES],
    "messages": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
    "responses": [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES],
}


async def sent(gateway: Gateway, upstream: Scripted, path: str, **fields: Any) -> dict[str, Any]:
    """What the upstream got of this request."""
    limit = {"max_tokens": 9} if path == "messages" else {}
    answer = await gateway.http.post(f"/v1/{path}", json={"model": "hosted", **limit, **fields})
    assert answer.status_code == 200, answer.text
    assert (await gateway.row())["status"] == "ok"
    (request,) = upstream.chats
    return request.body


@pytest.mark.parametrize("path", PICTURES)
async def test_an_image_of_30_mb(gateway: Gateway, upstream: Scripted, path: str) -> None:
    body = await sent(gateway, upstream, path, **PICTURES[path])
    (part,) = body["messages"][0]["content"]
    assert part["image_url"]["url"] == URL


@pytest.mark.parametrize("path", CONVERSATIONS)
async def test_1000_turns(gateway: Gateway, upstream: Scripted, path: str) -> None:
    body = await sent(gateway, upstream, path, **CONVERSATIONS[path])
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        (turn["role"], turn["content"]) for turn in TURNS
    ]


@pytest.mark.parametrize("path", TOOLS)
async def test_200_tools(gateway: Gateway, upstream: Scripted, path: str) -> None:
    prompt = "input" if path == "responses" else "messages"
    body = await sent(gateway, upstream, path, **{prompt: TURNS[:1], "tools": TOOLS[path]})
    assert [tool["function"]["name"] for tool in body["tools"]] == NAMES
    assert all(tool["function"]["parameters"] == SCHEMA for tool in body["tools"])
