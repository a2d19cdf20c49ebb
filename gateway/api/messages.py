"""Anthropic's Messages surface: its body as an OpenAI chat body, for upstreams that do not speak it themselves.

The caller's own body stays in `Call.original`: an Anthropic upstream gets it as it is.
"""

from typing import Any

import msgspec

from gateway.api.chunk import read_chunk
from gateway.api.fields import (
    Fields,
    an_object,
    answers,
    encoded,
    invalid,
    is_given,
    is_streamed,
    model_name,
    optional,
    read_fields,
    required,
    user_tags,
)
from gateway.api.messages_input import Conversation
from gateway.api.messages_output import blocks, error_body, new_message, stop, usage_object
from gateway.api.messages_stream import MessagesWriter
from gateway.api.messages_tools import effort, tool_choice, tools
from gateway.api.openai import max_output
from gateway.api.parts import Parts
from gateway.call import Call, Unsaid
from gateway.errors import ApiError
from gateway.upstreams.frames import Frame

Json = dict[str, Any]

_TRANSLATED = frozenset(
    {
        "messages",
        "system",
        "stop_sequences",
        "tools",
        "tool_choice",
        "metadata",
        "thinking",
        "output_config",
        "service_tier",
        "cache_control",  # a cheaper prompt, not another answer: other upstreams cache in their own ways
    }
)
"""Every other field goes to other upstreams as it is: its name means the same there, or we do not know it."""

_NATIVE = (
    "container",
    "context_management",
    "diagnostics",
    "inference_geo",
    "mcp_servers",
    "speed",
    "user_profile_id",
)
"""What only Anthropic has."""

_TIERS = {"auto": "auto", "standard_only": "default"}


class MessagesSurface:
    api = "messages"

    def decode(self, body: bytes) -> Call:
        fields = read_fields(body)
        required(fields, "max_tokens", int, "an integer")
        return decode_messages(self.api, fields, is_streamed(fields))

    def error(self, error: ApiError) -> bytes:
        return error_body(error)

    def whole(self, call: Call, reply: Frame) -> bytes:
        if reply.native is not None:
            return reply.native
        chunk = read_chunk(reply.raw)
        parts = Parts(_shows_thinking(call))
        if chunk.choice is not None:
            parts.take(chunk.choice.said)
        message = new_message(chunk, usage_object(reply.usage))
        message |= {"content": blocks(parts)} | stop(chunk.choice, parts, _stop_sequences(call))
        return msgspec.json.encode(message)

    def writer(self, call: Call) -> MessagesWriter:
        return MessagesWriter(_stop_sequences(call), _shows_thinking(call))


def decode_messages(api: str, fields: Fields, stream: bool) -> Call:
    """Raises ApiError 400 naming what is wrong and where."""
    turns: list[Json] = required(fields, "messages", list[dict[str, Any]], "an array of message objects")
    if not turns:
        raise invalid("messages", "must have at least one message")
    system = optional(fields, "system", str | list[dict[str, Any]], "a string or an array of text blocks")
    conversation = Conversation(system, turns)
    chat, unsaid = _parameters(fields)
    return Call(
        api=api,
        requested_model=model_name(fields),
        messages=conversation.messages,
        stream=stream,
        include_usage=True,
        continuous_usage=False,
        max_output=max_output(chat),
        choices=answers(chat),
        has_tools="tools" in chat,
        tags=user_tags(optional(chat, "user", str, "a string")),
        fields={**chat, "messages": encoded(conversation.messages)},
        original=fields,
        unsaid=(*conversation.unsaid, *unsaid),
    )


def _parameters(fields: Fields) -> tuple[Fields, list[Unsaid]]:
    """(every field but the messages in OpenAI's words, what has none)."""
    said: Json = {}
    unsaid = [Unsaid(name, True) for name in _NATIVE if is_given(fields, name)]
    if stops := optional(fields, "stop_sequences", list[str], "an array of strings"):
        said["stop"] = stops
    given: list[Json] = optional(fields, "tools", list[dict[str, Any]], "an array of tools") or []
    functions, more = tools(given)
    if functions:
        said["tools"] = functions
    if (choice := an_object(fields, "tool_choice")) and (functions or not given):
        said |= tool_choice(choice)
    output = an_object(fields, "output_config")
    word, most = effort(an_object(fields, "thinking"), output)
    if word:
        said["reasoning_effort"] = word
    if output.get("format"):
        said["response_format"] = _response_format(output["format"])
    if user := an_object(fields, "metadata").get("user_id"):
        said["user"] = str(user)
    if tier := optional(fields, "service_tier", str, "a string"):
        said["service_tier"] = _TIERS.get(tier, tier)
    kept = {name: raw for name, raw in fields.items() if name not in _TRANSLATED and name not in _NATIVE}
    return {**kept, **{name: encoded(value) for name, value in said.items()}}, [*unsaid, *more, *most]


def _response_format(given: Any) -> Json:
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise invalid("output_config.format", "must be an object with the `type` json_schema and a `schema`")
    schema = {"name": "output", "schema": given["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _stop_sequences(call: Call) -> list[str]:
    return optional(call.original or {}, "stop_sequences", list[str], "an array of strings") or []


def _shows_thinking(call: Call) -> bool:
    """A model may think without being asked; who asked it not to, or asked not to hear of it, does not hear of it."""
    thinking = an_object(call.original or {}, "thinking")
    return thinking.get("type") != "disabled" and thinking.get("display") != "omitted"
