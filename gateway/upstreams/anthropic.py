"""Anthropic's Messages API as an upstream, for callers of any surface; bodies of its own format go on as they came."""

from typing import Any

import msgspec

from gateway.call import Call
from gateway.errors import ApiError
from gateway.upstreams.anthropic_decoder import AnthropicDecoder
from gateway.upstreams.anthropic_request import Parameters
from gateway.upstreams.anthropic_turns import Turns
from gateway.upstreams.dialect import Limits, Request, leave_out
from gateway.upstreams.frames import Decoder, MalformedError

Json = dict[str, Any]

_VERSION = "2023-06-01"
_COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control")
"""What the length of a prompt depends on."""


class AnthropicDialect:
    health_path = "/models"

    def request(self, call: Call, model: str, limits: Limits, drop: bool) -> Request:
        body, dropped = self._body(call, model, limits, drop)
        return Request("/messages", msgspec.json.encode(body), dropped, _betas(call))

    def count_request(self, call: Call, model: str) -> Request:
        """Asks for the prompt's exact length, which `counted` reads in the answer."""
        body, _ = self._body(call, model, Limits(), drop=True)
        counted = msgspec.json.encode({name: body[name] for name in _COUNTED if name in body})
        return Request("/messages/count_tokens", counted, headers=_betas(call))

    def headers(self, key: str | None) -> dict[str, str]:
        return {"anthropic-version": _VERSION} | ({} if key is None else {"x-api-key": key})

    def decoder(self, call: Call) -> Decoder:
        return AnthropicDecoder(native=_is_native(call))

    def _body(self, call: Call, model: str, limits: Limits, drop: bool) -> tuple[Json, tuple[str, ...]]:
        if call.kind != "chat":
            text = "Anthropic has neither embeddings nor text completions. Choose another model."
            raise ApiError(400, "unsupported_endpoint", text, param="model")
        if _is_native(call):
            return _native_body(call, model, limits.cap), ()
        turns = Turns(call.messages)
        parameters = Parameters(call, turns, limits)
        dropped = call.leave_unsaid(drop) + leave_out(parameters.cannot, "anthropic", drop)
        system = {"system": turns.system} if turns.system else {}
        return {"model": model, **system, "messages": turns.turns, **parameters.said}, dropped


class _Count(msgspec.Struct):
    input_tokens: int


def counted(body: bytes) -> int:
    """The number of tokens in an answer to `count_request`. Raises MalformedError."""
    try:
        return msgspec.json.decode(body, type=_Count).input_tokens
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(f"it sent something that is not a count: {error}") from error


def _is_native(call: Call) -> bool:
    return call.original is not None and call.api in ("messages", "count_tokens")


def _betas(call: Call) -> dict[str, str]:
    return {"anthropic-beta": call.betas} if call.betas and _is_native(call) else {}


def _native_body(call: Call, model: str, max_output: int | None) -> Json:
    assert call.original is not None
    body: Json = {**call.original, "model": model}
    if max_output is not None:
        body["max_tokens"] = max_output
    if b'"thinking"' in bytes(call.original["messages"]):
        turns = msgspec.json.decode(call.original["messages"], type=list[Json])
        own = [{**turn, "content": _own_thoughts(turn.get("content"))} for turn in turns]
        body["messages"] = [turn for turn in own if turn["content"] != []]
    return body


def _own_thoughts(content: Any) -> Any:
    """Without the thinking of models that sign nothing, which another answer of this conversation came from."""
    if not isinstance(content, list):
        return content
    return [block for block in content if not _is_unsigned(block)]


def _is_unsigned(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "thinking" and not block.get("signature")
