"""Every surface over every upstream dialect, with the vendors' SDKs, over real sockets, down to the ledger."""

import json
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from tests.gateway.running import Gateway
from tests.gateway.scripted import Connection, Request, Scripted
from tests.gateway.surfaces import CALLS, chunk
from tests.gateway.test_anthropic_answers import START, block
from tests.gateway.vendors import QUESTION, anthropic_upstream, openai_upstream, send_events, with_claude

TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "time")
]


class Facts(NamedTuple):
    """What a caller learns, whatever its dialect."""

    thought: str
    text: str
    calls: list[tuple[str, str, Any]]
    ended: str
    usage: tuple[int, int, int, int, int]
    """Prompt, of that from and to the cache; completion, of that reasoning."""


EXPECTED = Facts("Two tools.", "Let me look.", CALLS, "tools", (20, 8, 2, 7, 3))


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return with_claude(settings)


@pytest.fixture
def upstreams(upstream: Scripted) -> Scripted:
    upstream.script = openai_upstream
    upstream.paths["/v1/messages"] = anthropic_upstream
    return upstream


async def by_chat(gateway: Gateway, model: str, stream: bool) -> Facts:
    sdk = gateway.sdk
    if not stream:
        whole = await sdk.chat.completions.create(model=model, messages=QUESTION, tools=TOOLS)
        message, usage = whole.choices[0].message, whole.usage
        made = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or [] if c.type == "function"]
        thought, text = str(message.to_dict()["reasoning_content"]), message.content or ""
        ended = whole.choices[0].finish_reason
    else:
        calls: dict[int, list[str]] = {}
        thought = text = ""
        ended, usage = None, None
        options: Any = {"include_usage": True}
        async for part in await sdk.chat.completions.create(
            model=model, messages=QUESTION, tools=TOOLS, stream=True, stream_options=options
        ):
            usage = part.usage or usage
            for choice in part.choices:
                thought += str(choice.delta.to_dict().get("reasoning_content") or "")
                text += choice.delta.content or ""
                ended = choice.finish_reason or ended
                for call in choice.delta.tool_calls or []:
                    assert call.function is not None
                    known = calls.setdefault(call.index, [call.id or "", call.function.name or "", ""])
                    known[2] += call.function.arguments or ""
        made = [(id, name, arguments) for _, (id, name, arguments) in sorted(calls.items())]
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.completion_tokens_details is not None
    counts = (
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens or 0,
        usage.prompt_tokens_details.cache_write_tokens or 0,
        usage.completion_tokens,
        usage.completion_tokens_details.reasoning_tokens or 0,
    )
    named = [(id, name, json.loads(arguments)) for id, name, arguments in made]
    return Facts(thought, text, named, {"tool_calls": "tools"}.get(ended or "", str(ended)), counts)


async def by_messages(gateway: Gateway, model: str, stream: bool) -> Facts:
    tools: Any = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    async with AsyncAnthropic(base_url=gateway.url, api_key=gateway.people.secret, max_retries=0) as client:
        if stream:
            async with client.messages.stream(model=model, max_tokens=99, messages=QUESTION, tools=tools) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(model=model, max_tokens=99, messages=QUESTION, tools=tools)
    usage = message.usage
    read, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    thinking = usage.output_tokens_details.thinking_tokens if usage.output_tokens_details else 0
    return Facts(
        "".join(part.thinking for part in message.content if part.type == "thinking"),
        "".join(part.text for part in message.content if part.type == "text"),
        [(part.id, part.name, part.input) for part in message.content if part.type == "tool_use"],
        {"tool_use": "tools"}.get(message.stop_reason or "", str(message.stop_reason)),
        (usage.input_tokens + read + written, read, written, usage.output_tokens, thinking),
    )


async def by_responses(gateway: Gateway, model: str, stream: bool) -> Facts:
    tools: Any = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
    sdk = gateway.sdk
    if stream:
        async with sdk.responses.stream(model=model, input="Weather and time?", tools=tools) as events:
            response: Any = await events.get_final_response()
    else:
        response = await sdk.responses.create(model=model, input="Weather and time?", tools=tools)
    usage = response.usage
    calls = [(part.call_id, part.name, json.loads(part.arguments)) for part in response.output if "call" in part.type]
    return Facts(
        "".join(text.text for part in response.output if part.type == "reasoning" for text in part.content),
        response.output_text,
        calls,
        "tools" if calls and response.status == "completed" else response.status,
        (
            usage.input_tokens,
            usage.input_tokens_details.cached_tokens,
            usage.input_tokens_details.cache_write_tokens,
            usage.output_tokens,
            usage.output_tokens_details.reasoning_tokens,
        ),
    )


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("model", ["hosted", "claude"])
@pytest.mark.parametrize("ask", [by_chat, by_messages, by_responses])
async def test_an_answer_says_the_same_everywhere(
    gateway: Gateway, upstreams: Scripted, ask: Any, model: str, stream: bool
) -> None:
    assert await ask(gateway, model, stream) == EXPECTED
    row = await gateway.row()
    assert (row["status"], row["model"], row["stream"]) == ("ok", model, stream)
    (attempt,) = row["attempts"]
    assert (attempt["input_fresh"], attempt["input_cached"], attempt["input_cache_write"]) == (10, 8, 2)
    assert (attempt["output_text"], attempt["output_reasoning"]) == (4, 3)
    (sent,) = (request for request in upstreams.requests if request.method == "POST")
    assert sent.path == ("/v1/messages" if model == "claude" else "/v1/chat/completions")
    names = [tool.get("name") or tool["function"]["name"] for tool in sent.body["tools"]]
    assert names == ["weather", "time"]
    if model == "claude":
        assert sent.headers["anthropic-version"] and sent.body["model"] == "claude-1"


def failing(k: int, stream: Any) -> Any:
    """An upstream that resets its connection after k frames."""

    async def script(request: Request, connection: Connection) -> None:
        await connection.start()
        await stream(connection, k)
        connection.die()

    return script


async def some_chunks(connection: Connection, k: int) -> None:
    for _ in range(k):
        await connection.frame(chunk({"content": "word "}))


async def some_events(connection: Connection, k: int) -> None:
    words = [{"type": "text_delta", "text": "word "}] * k
    await send_events(connection, [START, *block(0, {"type": "text", "text": ""}, *words)[:-1]])


@pytest.fixture
def dying(upstream: Scripted) -> Scripted:
    upstream.script = failing(3, some_chunks)
    upstream.paths["/v1/messages"] = failing(3, some_events)
    return upstream


@pytest.mark.parametrize("model", ["hosted", "claude"])
async def test_an_upstream_that_dies_in_mid_message(
    gateway: Gateway, dying: Scripted, claude: AsyncAnthropic, model: str
) -> None:
    text = ""
    with pytest.raises(anthropic.APIStatusError, match="failed in the middle of the answer"):
        async with claude.messages.stream(model=model, max_tokens=9, messages=QUESTION) as events:
            async for word in events.text_stream:
                text += word
    assert text == "word word word "
    await check_failed_row(gateway)


@pytest.mark.parametrize("model", ["hosted", "claude"])
async def test_an_upstream_that_dies_in_mid_response(gateway: Gateway, dying: Scripted, model: str) -> None:
    seen = []
    with pytest.raises(openai.APIError, match="failed in the middle of the answer"):
        async for event in await gateway.sdk.responses.create(model=model, input="q", stream=True):
            seen.append(event)
    assert seen[-1].type == "response.failed" and seen[-1].response.output_text == "word word word "
    await check_failed_row(gateway)


async def test_an_anthropic_upstream_that_dies_in_mid_chat(gateway: Gateway, dying: Scripted) -> None:
    text = ""
    with pytest.raises(openai.APIError, match="failed in the middle of the answer"):
        async for part in await gateway.sdk.chat.completions.create(model="claude", messages=QUESTION, stream=True):
            text += part.choices[0].delta.content or ""
    assert text == "word word word "
    await check_failed_row(gateway)


async def check_failed_row(gateway: Gateway) -> None:
    row = await gateway.row()
    assert row["status"] == "upstream_error"
    (attempt,) = row["attempts"]
    assert attempt["output_text"] >= 3, "at least what was delivered"
    assert attempt["usage_source"] == "estimated"
