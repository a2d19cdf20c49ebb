"""Upstreams that answer one question in OpenAI's and in Anthropic's dialect, whole or streamed."""

import json
from typing import Any

from tests.gateway.scripted import Connection, Request
from tests.gateway.surfaces import CALLS, INTERLEAVED, USAGE, chunk, usage_fields
from tests.gateway.test_anthropic_answers import START, block, end

QUESTION: Any = [{"role": "user", "content": "Weather and time?"}]
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


def with_claude(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with a model at an upstream of Anthropic's dialect."""
    url = settings["upstreams"]["hosted"]["base_url"]
    settings["upstreams"]["anthropic"] = {"kind": "anthropic", "base_url": url, "connect_window_seconds": 1.0}
    price = settings["models"]["hosted"]["price"]
    settings["models"]["claude"] = {
        "upstreams": [{"upstream": "anthropic", "upstream_model": "claude-1", "cost": price}],
        "price": price,
    }
    return settings
