"""OpenAI's Responses surface, without its memory: each request brings its whole conversation."""

from typing import Any

import msgspec

from gateway.api.chunk import Choice, read_chunk
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
from gateway.api.openai import error_body, max_output
from gateway.api.parts import Parts
from gateway.api.responses_input import Items
from gateway.api.responses_object import Answer
from gateway.api.responses_stream import ResponsesWriter
from gateway.api.responses_tools import tool_choice, tools
from gateway.call import Call, Unsaid, plain
from gateway.errors import ApiError
from gateway.upstreams.frames import Frame

Json = dict[str, Any]

_TRANSLATED = frozenset(
    {
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "max_output_tokens",
        "max_tool_calls",  # of tools that OpenAI runs itself: there are none
        "text",
        "reasoning",
        "metadata",  # goes back with the response
        "truncation",
        "include",
        "stream_options",
        "top_logprobs",
    }
)
"""Every other field has the same name in chat completions, or we do not know it: it goes to the upstream as it is."""

_ELSEWHERE = ("access_programs", "background_options", "context_management", "image", "moderation")
"""What only OpenAI has."""

_KEPT = {
    "previous_response_id": "Leave it out and send the whole conversation in `input`",
    "conversation": "Leave it out and send the whole conversation in `input`",
    "prompt": "Leave it out and send the prompt's text in `instructions` and `input`",
    "background": "Leave it out, and stream the response or wait for it",
    "store": "Set it to false or leave it out, and send the whole conversation in `input` each time",
}
"""What would need something kept from one request to the next, and what to do instead."""

_NOT_FORWARDED = _TRANSLATED | {*_ELSEWHERE} | _KEPT.keys()


class ResponsesSurface:
    api = "responses"

    def decode(self, body: bytes) -> Call:
        fields = read_fields(body)
        for name, advice in _KEPT.items():
            if fields.get(name) is not None and bytes(fields[name]) not in (b"null", b"false"):
                text = f"`{name}` is not supported: no responses are kept here. {advice}."
                raise ApiError(400, "unsupported_parameter", text, param=name)
        instructions = optional(fields, "instructions", str, "a string")
        items = Items(instructions, _input(fields))
        chat, unsaid = _parameters(fields)
        return Call(
            api=self.api,
            requested_model=model_name(fields),
            messages=items.messages,
            stream=is_streamed(fields),
            include_usage=True,
            continuous_usage=False,
            max_output=max_output(chat),
            choices=answers(chat),
            has_tools="tools" in chat,
            tags=user_tags(optional(fields, "user", str, "a string")),
            fields={**chat, "messages": encoded(items.messages)},
            original=fields,
            unsaid=(*items.unsaid, *unsaid),
        )

    def error(self, error: ApiError) -> bytes:
        return error_body(error)

    def whole(self, call: Call, reply: Frame) -> bytes:
        chunk = read_chunk(reply.raw)
        parts = Parts()
        choice = chunk.choice or Choice()
        parts.take(choice.said)
        for part in parts.row:
            part.logprobs = choice.token_logprobs if part.kind == "text" else []
        return msgspec.json.encode(Answer(call, chunk.model).ended(parts.row, choice.finish_reason, reply.usage))

    def writer(self, call: Call) -> ResponsesWriter:
        return ResponsesWriter(call)


def _input(fields: Fields) -> list[Json]:
    given: str | list[Json] = required(fields, "input", str | list[dict[str, Any]], "a string or an array of items")
    if not given:
        raise invalid("input", "must not be empty")
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _parameters(fields: Fields) -> tuple[Fields, list[Unsaid]]:
    """(every field but the messages in the words of chat completions, what has none)."""
    said: Json = {}
    unsaid = [Unsaid(name, True) for name in _ELSEWHERE if is_given(fields, name)]
    if (most := optional(fields, "max_output_tokens", int, "an integer")) is not None:
        said["max_tokens"] = most
    functions, more = tools(optional(fields, "tools", list[dict[str, Any]], "an array of tools") or [])
    if functions:
        said["tools"] = functions
        choice, odd = tool_choice(optional(fields, "tool_choice", str | dict[str, Any], "a string or an object"))
        said |= {"tool_choice": choice} if choice is not None else {}
        parallel = optional(fields, "parallel_tool_calls", bool, "true or false")
        said |= {"parallel_tool_calls": parallel} if parallel is not None else {}
        more += odd
    unsaid += more + _reasoning(fields, said) + _text(fields, said) + _output(fields, said)
    if optional(fields, "truncation", str, "a string") not in (None, "disabled"):
        unsaid.append(Unsaid("truncation (auto)", True))
    left = {name: raw for name, raw in fields.items() if name not in _NOT_FORWARDED}
    return {**left, **{name: encoded(value) for name, value in said.items()}}, unsaid


def _reasoning(fields: Fields, said: Json) -> list[Unsaid]:
    """A summary of the reasoning is the reasoning itself, which is the most detailed one."""
    given = an_object(fields, "reasoning")
    if given.get("effort") is not None:
        said["reasoning_effort"] = given["effort"]
    neutral = {"context": ("auto",), "mode": ("standard",), "summary": ("auto", "detailed")}
    neutral["generate_summary"] = neutral["summary"]
    odd = [name for name, value in given.items() if name != "effort" and value not in (None, *neutral.get(name, ()))]
    return [Unsaid(f"reasoning.{plain(name)}", True) for name in odd]


def _text(fields: Fields, said: Json) -> list[Unsaid]:
    given = an_object(fields, "text")
    if given.get("verbosity") is not None:
        said["verbosity"] = given["verbosity"]
    wanted = given.get("format") or {"type": "text"}
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type" and value is not None}
        said["response_format"] = {"type": kind, "json_schema": schema}
    elif kind == "json_object":
        said["response_format"] = wanted
    elif kind != "text":
        raise invalid("text.format", "must have the `type` text, json_object or json_schema")
    return [Unsaid(f"text.{plain(name)}", True) for name in given if name not in ("format", "verbosity")]


def _output(fields: Fields, said: Json) -> list[Unsaid]:
    """What the response shall tell besides. Details of OpenAI's own tools there are none of."""
    wanted: list[str] = optional(fields, "include", list[str], "an array of strings") or []
    alternatives = optional(fields, "top_logprobs", int, "an integer")
    if "message.output_text.logprobs" in wanted or alternatives:
        said["logprobs"] = True
        said |= {"top_logprobs": alternatives} if alternatives else {}
    odd = [name for name, value in an_object(fields, "stream_options").items() if value]
    return [Unsaid(f"stream_options.{plain(name)}", True) for name in odd]
