"""OpenAI's wire format: request bodies in, error objects and model lists out."""

import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.protocol import ErrorBody, ErrorDetail
from gateway.call import Call, storable
from gateway.errors import ApiError, UpstreamReplyError
from gateway.settings import ROLES, Settings

_HALF_A_PAIR = re.compile(rb"\\u[dD][89abAB]..")
"""At the very end of a body: msgspec calls a first half with fewer than 6 bytes after it truncated."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def decode_chat(body: bytes) -> Call:
    """Decode a chat completion request. Raises ApiError 400 naming what is wrong and where.

    Only what the gateway itself acts on is looked at; the rest stays raw JSON for the upstream to judge.
    """
    fields = _fields(body)
    return Call(
        api="chat.completions",
        requested_model=_required(fields, "model", str, "a string"),
        messages=_messages(fields),
        stream=_optional(fields, "stream", bool, "true or false") or False,
        include_usage=(options := _stream_options(fields)).include_usage or False,
        continuous_usage=options.continuous_usage_stats or False,
        max_output=_max_output(fields),
        choices=_choices(fields),
        has_tools=bool(_optional(fields, "tools", list[msgspec.Raw], "an array")),
        tags=_tags(fields),
        fields=fields,
    )


def _fields(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        body.decode()  # msgspec does not look inside raw strings
    except UnicodeDecodeError as error:
        raise ApiError(400, "invalid_utf8", f"The body is not valid UTF-8 at byte {error.start}.") from None
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise ApiError(400, "invalid_json", "The body must be a JSON object.") from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        halved = "surrogate" in reason or "hex escape" in reason  # msgspec's words in a value it decodes, or skips
        if halved or ("truncated" in reason and _HALF_A_PAIR.search(body[-12:])):
            reason = "a \\u escape is half of a surrogate pair, which is no character"
        elif "truncated" in reason:
            reason = f"it ends too early (byte {len(body)}) or a \\u escape is incomplete"
        raise ApiError(400, "invalid_json", f"The body is not valid JSON: {reason}.") from None
    except RecursionError:
        raise ApiError(400, "invalid_json", "The body's JSON is nested too deeply.") from None


def _optional(fields: dict[str, msgspec.Raw], name: str, kind: Any, words: str) -> Any:
    """The decoded field, None when absent or null. Raises ApiError naming it."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=kind | None)
    except (msgspec.DecodeError, RecursionError) as error:
        place = str(error).partition(" - at `$")[2].rstrip("`")
        detail = f" ({error})" if place else ""
        text = f"`{name}` must be {words}{detail}."
        raise ApiError(400, "invalid_value", text, param=name) from None


def _required(fields: dict[str, msgspec.Raw], name: str, kind: Any, words: str) -> Any:
    value = _optional(fields, name, kind, words)
    if value is None:
        raise ApiError(400, "missing_required_parameter", f"`{name}` is required: {words}.", param=name)
    return value


def _messages(fields: dict[str, msgspec.Raw]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = _required(fields, "messages", list[dict[str, Any]], "an array of message objects")
    if not messages:
        raise ApiError(400, "invalid_value", "`messages` must have at least one message.", param="messages")
    return messages


def _stream_options(fields: dict[str, msgspec.Raw]) -> _StreamOptions:
    return _optional(fields, "stream_options", _StreamOptions, "an object") or _StreamOptions()


def _max_output(fields: dict[str, msgspec.Raw]) -> int | None:
    """max_completion_tokens, else max_tokens (its older name). Any integer is let through: the upstream judges it."""
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = _optional(fields, name, int, "an integer")
        if value is not None:
            return value
    return None


def _choices(fields: dict[str, msgspec.Raw]) -> int:
    value: int | None = _optional(fields, "n", int, "an integer")
    if value is not None and value < 1:
        raise ApiError(400, "invalid_value", f"`n` must be at least 1, not {value}.", param="n")
    return value or 1


def _tags(fields: dict[str, msgspec.Raw]) -> dict[str, str]:
    """`user` is a tag for the reader of the ledger; who pays is decided by the key alone."""
    user: str | None = _optional(fields, "user", str, "a string")
    return {"user": storable(user)} if user else {}


def error_body(error: ApiError) -> bytes:
    if isinstance(error, UpstreamReplyError):
        return error.body
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code)))


def model_list(settings: Settings, hosted: Mapping[str, set[str] | None]) -> bytes:
    """`GET /v1/models`: the routed names first, then the real ones that can answer.

    `hosted`: by upstream, the models it has loaded, so far as known; a configured model that is not among them is left
    out.
    """
    names = ["auto", *ROLES]
    for name, model in settings.models.items():
        loaded = hosted.get(model.upstream)
        if loaded is None or (model.upstream_model or name) in loaded:
            names.append(name)
    created = int(time.time())
    data = [{"id": name, "object": "model", "created": created, "owned_by": "farthing"} for name in names]
    return msgspec.json.encode({"object": "list", "data": data})
