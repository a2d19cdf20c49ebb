"""Decodes what a caller sends.

A parameter is honoured or refused by its name. Those in `OFF` are not supported yet: they are accepted only with a
value that asks for nothing.
"""

import json
import math
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.errors import ApiError, bad_request
from engine.pooling import PoolingKind

OFF: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "service_tier": (None, "auto", "default"),
}

_HALF_A_PAIR = re.compile(rb"\\u[dD][89abAB]..")
"""At the very end of a body: msgspec calls a first half with fewer than 6 bytes after it truncated."""


TokenId = Annotated[int, Meta(ge=0)]


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
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    deterministic: bool | None = None
    priority: int | None = None
    """Lower runs first."""
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    """A JSON Schema, or its text."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    """In Lark's syntax, from the rule `start`."""
    # No effect on what is generated, by OpenAI's definition.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class ChatRequest(_Generate, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's own chat template, such as `enable_thinking`."""
    reasoning_effort: str | None = None
    """One of them, where the template has it."""


class CompletionRequest(_Generate, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    """One or several, each a text or its token ids."""
    suffix: str | None = None
    """What stands behind the gap that the answer fills."""
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str
    messages: list[dict[str, Any]] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    suffix: str | None = None
    """Goes with `prompt`, as in CompletionRequest."""
    # Of a conversation, as in ChatRequest.
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    block_hashes: bool = False
    """Name the prompt's full blocks too, as this tenant's requests look for them."""


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str
    tokens: list[TokenId]


class EmbeddingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: str | list[Any]
    """A text, its tokens, or a list of either."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: PoolingKind = "mean"
    priority: int | None = None
    user: str | None = None


class AbortRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str


T = TypeVar("T", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, EmbeddingRequest, AbortRequest)


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
