"""Every surface over every upstream dialect, with the vendors' SDKs, over real sockets, down to the ledger."""

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from tests.gateway.running import Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Scripted
from tests.gateway.surfaces import CALLS, INTERLEAVED, USAGE, chunk, usage_fields
from tests.gateway.test_anthropic_answers import START, block, end

QUESTION: Any = [{"role": "user", "content": "Weather and time?"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "time")
]
USAGE_AT_END = usage_fields(USAGE)
WHOLE_CALLS = [
    {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    for id, name, arguments in CALLS
]
MESSAGE_USAGE = {
    "input_tokens": 10,
    "cache_read_input_tokens": 8,
    "cache_creation_input_tokens": 2,
    "output_tokens": 7,
    "output_tokens_details": {"thinking_tokens": 3},
}
BLOCKS = [
    {"type": "thinking", "thinking": "Two tools.", "signature": "S"},
    {"type": "text", "text": "Let me look."},
    *({"type": "tool_use", "id": id, "name": name, "input": arguments} for id, name, arguments in CALLS),
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


async def openai_upstream(request: Request, connection: Connection) -> None:
    if not request.body.get("stream"):
        message = {"role": "assistant", "content": "Let me look.", "reasoning_content": "Two tools."}
        choice = {"index": 0, "message": message | {"tool_calls": WHOLE_CALLS}, "finish_reason": "tool_calls"}
        reply = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m-1", "choices": [choice]}
        await connection.json(reply | {"usage": USAGE_AT_END})
        return
    await connection.start()
    for value in (chunk({"role": "assistant"}), chunk({"reasoning_content": "Two tools."}), *INTERLEAVED):
        await connection.frame(value)
    await connection.frame(chunk({}) | {"choices": [], "usage": USAGE_AT_END})
    await connection.done()


def anthropic_events() -> list[dict[str, Any]]:
    start = {**START, "message": START["message"] | {"usage": MESSAGE_USAGE | {"output_tokens": 1}}}
    found = [start]
    for index, content in enumerate(BLOCKS):
        kind = content["type"]
        if kind == "thinking":
            signed = {"type": "signature_delta", "signature": content["signature"]}
            deltas = [{"type": "thinking_delta", "thinking": content["thinking"]}, signed]
            found += block(index, {"type": kind, "thinking": "", "signature": ""}, *deltas)
        elif kind == "text":
            found += block(index, {"type": kind, "text": ""}, {"type": "text_delta", "text": content["text"]})
        else:
            text = json.dumps(content["input"])
            deltas = [{"type": "input_json_delta", "partial_json": text[:5]}]
            deltas += [{"type": "input_json_delta", "partial_json": text[5:]}]
            found += block(index, content | {"input": {}}, *deltas)
    delta, stop = end("tool_use")
    return [*found, delta | {"usage": MESSAGE_USAGE}, stop]


async def send_events(connection: Connection, events: list[dict[str, Any]]) -> None:
    for event in events:
        await connection.chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())


async def anthropic_upstream(request: Request, connection: Connection) -> None:
    if request.body.get("stream"):
        await connection.start()
        await send_events(connection, anthropic_events())
        await connection.send(b"0\r\n\r\n")
        return
    stop = {"stop_reason": "tool_use", "stop_sequence": None}
    await connection.json(START["message"] | {"content": BLOCKS, "usage": MESSAGE_USAGE, **stop})


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    """With a model at an upstream of Anthropic's dialect."""
    url = settings["upstreams"]["hosted"]["base_url"]
    settings["upstreams"]["anthropic"] = {"kind": "anthropic", "base_url": url, "connect_window_seconds": 1.0}
    price = settings["models"]["hosted"]["price"]
    settings["models"]["claude"] = {
        "upstreams": [{"upstream": "anthropic", "upstream_model": "claude-1", "cost": price}],
        "price": price,
    }
    return settings


@pytest.fixture
async def claude(gateway: Gateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=gateway.url, api_key=gateway.people.secret, max_retries=2) as client:
        yield client


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


async def test_message_start_has_the_engine_s_own_count(gateway: Gateway, claude: AsyncAnthropic) -> None:
    async with claude.messages.stream(model="tiny", max_tokens=9, messages=QUESTION) as events:
        first = await anext(aiter(events))
        assert first.type == "message_start"
        usage = first.message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (6, 4, 0)
        message = await events.get_final_message()
    assert message.content[0].type == "text" and message.content[0].text == "Hello world"
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 3)


async def test_counting_tokens(gateway: Gateway, upstream: Scripted, claude: AsyncAnthropic) -> None:
    async def count(request: Request, connection: Connection) -> None:
        await connection.json({"input_tokens": 42})

    upstream.paths["/v1/messages/count_tokens"] = count
    tools: Any = [{"name": "f", "input_schema": {"type": "object"}}]
    assert (await claude.messages.count_tokens(model="tiny", messages=QUESTION, tools=tools)).input_tokens == 10
    asked = next(request for request in upstream.requests if request.path == "/tokenize")
    assert asked.body["tools"][0]["function"]["name"] == "f", "tools are part of the prompt"
    assert (await claude.messages.count_tokens(model="claude", messages=QUESTION)).input_tokens == 42
    with pytest.raises(anthropic.APIStatusError, match="cannot count tokens") as caught:
        await claude.messages.count_tokens(model="hosted", messages=QUESTION)
    assert caught.value.status_code == 501
    assert len(await gateway.rows(3)) == 3, "the SDK did not try again"


async def test_refusals_in_anthropic_s_shape(gateway: Gateway, upstreams: Scripted, claude: AsyncAnthropic) -> None:
    async with AsyncAnthropic(base_url=gateway.url, api_key="no-key", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(model="tiny", max_tokens=9, messages=QUESTION)
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await claude.messages.create(model="nobody", max_tokens=9, messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError, match="container"):
        await claude.messages.create(model="hosted", max_tokens=9, messages=QUESTION, extra_body={"container": "c"})
    await claude.messages.create(model="claude", max_tokens=9, messages=QUESTION, extra_body={"container": "c"})
    assert upstreams.requests[-1].body["container"] == "c"

    async def refuse(request: Request, connection: Connection) -> None:
        error = {"type": "invalid_request_error", "message": "max_tokens: too many"}
        await connection.json({"type": "error", "error": error, "request_id": "req_1"}, 400)

    upstreams.paths["/v1/messages"] = refuse
    with pytest.raises(anthropic.BadRequestError, match="too many"):
        await claude.messages.create(model="claude", max_tokens=9, messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="too many") as caught:
        await gateway.sdk.chat.completions.create(model="claude", messages=QUESTION)
    assert caught.value.type == "invalid_request_error"


async def test_a_response_is_not_kept(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="no responses are kept here") as caught:
        await gateway.sdk.responses.create(model="tiny", input="q", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


async def test_embeddings_as_openai_s_clients_ask_for_them(gateway: Gateway, upstream: Scripted) -> None:
    numbers = [i / 256 for i in range(768)]

    async def embed(request: Request, connection: Connection) -> None:
        data = [{"object": "embedding", "index": 0, "embedding": numbers}]  # whatever was asked for
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        await connection.json({"object": "list", "data": data, "model": "m-1", "usage": usage})

    upstream.paths["/v1/embeddings"] = embed
    reply = await gateway.sdk.embeddings.create(model="hosted", input="text")
    assert upstream.requests[-1].body["encoding_format"] == "base64"
    assert reply.data[0].embedding == numbers
    row = await gateway.row()
    assert (row["attempts"][0]["input_fresh"], row["attempts"][0]["output_text"]) == (3, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_text_completions(gateway: Gateway, upstream: Scripted, stream: bool) -> None:
    async def complete(request: Request, connection: Connection) -> None:
        def reply(text: str, finish: str | None) -> dict[str, Any]:
            choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
            return {"id": "c", "object": "text_completion", "created": 1, "model": "m-1", "choices": [choice]}

        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        if not request.body["stream"]:
            await connection.json(reply("你好🙂", "stop") | {"usage": usage})
            return
        await connection.start()
        await connection.frame(reply("你好", None))
        await connection.frame(reply("🙂", "stop"))
        await connection.frame(reply("", None) | {"choices": [], "usage": usage})
        await connection.done()

    upstream.paths["/v1/completions"] = complete
    prompt = ["one", "two"]
    sdk = gateway.sdk
    if stream:
        parts = await sdk.completions.create(model="hosted", prompt=prompt, stream=True)
        text = "".join([part.choices[0].text async for part in parts])
    else:
        text = (await sdk.completions.create(model="hosted", prompt=prompt, stream=False)).choices[0].text
    assert text == "你好🙂"
    assert upstream.requests[-1].body["prompt"] == prompt
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["input_fresh"], attempt["output_text"], attempt["usage_source"]) == (3, 2, "upstream")


async def test_parameters_that_a_route_drops(settings: dict[str, Any], upstreams: Scripted) -> None:
    settings["models"]["claude"]["drop_params"] = True
    async with running_gateway(settings) as gateway:
        raw = await gateway.sdk.chat.completions.with_raw_response.create(model="claude", messages=QUESTION, seed=1)
        assert raw.headers["x-farthing-dropped-params"] == "seed"
        assert "seed" not in upstreams.requests[-1].body


async def test_both_vendors_clients_list_the_models(gateway: Gateway, claude: AsyncAnthropic) -> None:
    named = [model.id async for model in gateway.sdk.models.list()]
    assert named[:3] == ["auto", "small", "large"] and "claude" in named
    found = [model async for model in claude.models.list()]
    assert [model.id for model in found] == named
    assert {(model.type, model.lifecycle, model.created_at.year > 2000) for model in found} == {
        ("model", "active", True)
    }
