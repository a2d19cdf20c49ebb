"""Decodes what a caller sends to /v1/chat/completions, /v1/completions, /tokenize and /v1/abort.

A parameter is honoured or refused by its name. Those in `OFF` are not supported yet: they are accepted only with a
value that asks for nothing.
"""

import json
import math
import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.errors import ApiError, bad_request
from engine.sampling import ParameterError, SamplingParams

COMPLETION_DEFAULT_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; chat has none."""

OFF: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}

_HALF_A_PAIR = re.compile(rb"\\u[dD][89abAB]..")
"""At the very end of a body: msgspec calls a first half with fewer than 6 bytes after it truncated."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Every chunk carries the usage so far."""


class _Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What chat and completions have in common. None means not given."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    ignore_eos: bool | None = None
    # No effect on what is generated, by OpenAI's definition.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class ChatRequest(_Generate, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: list[dict[str, Any]]


class CompletionRequest(_Generate, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[Annotated[int, Meta(ge=0)]]


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str
    messages: list[dict[str, Any]] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET


class AbortRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str


T = TypeVar("T", ChatRequest, CompletionRequest, TokenizeRequest, AbortRequest)


def decode(body: bytes, kind: type[T]) -> T:
    """The body as a `kind`; raises ApiError (400) with a sentence and, where one is to blame, the parameter's name."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        name = _non_finite(body)
        if name is not None:
            raise bad_request(f"{name} must be a finite number.", name) from error
        if "surrogate" in str(error) or ("truncated" in str(error) and _HALF_A_PAIR.search(body[-12:])):
            text = "The request body has a \\u escape that is half of a surrogate pair, which is no character."
            raise bad_request(text, code="invalid_json") from error
        wanted = "a JSON object" if isinstance(error, msgspec.ValidationError) else "valid JSON in UTF-8"
        raise bad_request(f"The request body is not {wanted}: {error}.", code="invalid_json") from error
    if kind is ChatRequest or kind is CompletionRequest:
        fields = _drop_off_values(fields)
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error
    if isinstance(request, ChatRequest | CompletionRequest):
        if request.store:
            raise bad_request("store must be false or left out: this server keeps no conversations.", "store")
        if request.stream_options is not None and not request.stream:
            raise bad_request("stream_options is only allowed together with stream: true.", "stream_options")
    return request


def sampling_params(request: ChatRequest | CompletionRequest) -> SamplingParams:
    """The request's sampling parameters, defaults filled in; raises ApiError naming the one that is out of range."""
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise bad_request("Give max_tokens or max_completion_tokens, not both.", "max_tokens")
    limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if limit is not None and limit < 1:
        raise bad_request(f"{limit_name} must be at least 1, not {limit}.", limit_name)
    if limit is None and isinstance(request, CompletionRequest):
        limit = COMPLETION_DEFAULT_TOKENS
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")
        if (value := getattr(request, name)) is not None
    }
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    params = SamplingParams(**given, stop=stop, max_tokens=limit)
    try:
        params.validate()
    except ParameterError as error:
        raise bad_request(f"{error}.", error.param) from error
    return params


def _drop_off_values(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in fields.items():
        if name not in OFF:
            kept[name] = value
        elif not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in OFF[name]):
            raise ApiError(400, f"{name} is not supported yet: leave it out.", param=name, code="unsupported_parameter")
    return kept


_PATH = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<path>.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")


def _explain(message: str) -> ApiError:
    """msgspec's sentence as ours, with the parameter it is about."""
    path = ""
    if found := _PATH.match(message):
        message, path = found["what"], found["path"]
    if found := _UNKNOWN.match(message):
        name = f"{path}.{found['name']}" if path else found["name"]
        return bad_request(f"Unknown parameter: {name}.", name, code="unknown_parameter")
    if found := _MISSING.match(message):
        name = f"{path}.{found['name']}" if path else found["name"]
        return bad_request(f"Missing required parameter: {name}.", name, code="missing_required_parameter")
    return bad_request(f"{path}: {message[0].lower()}{message[1:]}.", path or None, code="invalid_type")


def _non_finite(body: bytes) -> str | None:
    """Name of the parameter that is NaN or infinite, in a body that is JSON except for that."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return next((k for k, v in fields.items() if isinstance(v, float) and not math.isfinite(v)), None)
