"""OpenAI's wire format: chat request bodies in, error objects and model lists out."""

from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from engine.protocol import ErrorBody, ErrorDetail
from gateway.api.fields import Fields, answers, is_streamed, model_name, optional, read_fields, required, user_tags
from gateway.call import Call
from gateway.errors import ApiError, UpstreamReplyError
from gateway.settings import ROLES, Settings

_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
"""The second is the first's older name; the third is llama.cpp's, which goes before the others there."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def decode_chat(body: bytes) -> Call:
    """Decode a chat completion request. Raises ApiError 400 naming what is wrong and where.

    Only what the gateway itself acts on is looked at; the rest stays raw JSON for the upstream to judge.
    """
    fields = read_fields(body)
    options = stream_options(fields)
    return Call(
        api="chat.completions",
        requested_model=model_name(fields),
        messages=_messages(fields),
        stream=is_streamed(fields),
        include_usage=options.include_usage or False,
        continuous_usage=options.continuous_usage_stats or False,
        max_output=max_output(fields),
        choices=answers(fields),
        has_tools=bool(optional(fields, "tools", list[msgspec.Raw], "an array")),
        tags=user_tags(optional(fields, "user", str, "a string")),
        fields=fields,
    )


def _messages(fields: Fields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = required(fields, "messages", list[dict[str, Any]], "an array of message objects")
    if not messages:
        raise ApiError(400, "invalid_value", "`messages` must have at least one message.", param="messages")
    return messages


def stream_options(fields: Fields) -> StreamOptions:
    return optional(fields, "stream_options", StreamOptions, "an object") or StreamOptions()


def max_output(fields: Fields) -> int | None:
    """The largest of the limits given, since upstreams differ in which one they obey; but one below 1, which some take
    for no limit, before all. Any integer is let through: the upstream judges it."""
    found = [optional(fields, name, int, "an integer") for name in _LIMITS if name in fields]
    given = [limit for limit in found if limit is not None]
    return max(given) if given and min(given) > 0 else min(given, default=None)


def error_body(error: ApiError) -> bytes:
    """An upstream's own error body goes to the caller as it came, unless it is in Anthropic's shape."""
    if isinstance(error, UpstreamReplyError) and not anthropic_error(error.body):
        return error.body
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code)))


class _Theirs(msgspec.Struct):
    type: str | None = None


def anthropic_error(body: bytes) -> bool:
    """Whether an error body is Anthropic's: only theirs says `"type": "error"` at its top."""
    try:
        return msgspec.json.decode(body, type=_Theirs).type == "error"
    except (msgspec.DecodeError, RecursionError):
        return False


def model_names(
    settings: Settings, hosted: Mapping[str, set[str] | None], allowed: Container[str] | None = None
) -> list[str]:
    """What can be asked for: the routed names first, then the real ones that can answer.

    `hosted`: by upstream, the models it has loaded, so far as known; a configured model that is not among them is left
    out. `allowed`: the names that the key may ask for; None: any.
    """
    names = ["auto", *ROLES]
    for name, model in settings.models.items():
        found = ((hosted.get(target.upstream), target.upstream_model or name) for target in model.upstreams)
        if any(loaded is None or called in loaded for loaded, called in found):
            names.append(name)
    return [name for name in names if allowed is None or name in allowed]


def model_list(offered: Sequence[str]) -> bytes:
    """`GET /v1/models`, for both vendors' clients."""
    page = {"has_more": False, "first_id": offered[0] if offered else None, "last_id": offered[-1] if offered else None}
    return msgspec.json.encode({"object": "list", "data": [_model(name) for name in offered], **page})


def model_object(name: str, offered: Sequence[str]) -> bytes:
    """`GET /v1/models/{name}`: its entry in the list. Raises ApiError 404 where it has none."""
    if name not in offered:
        text = f"The model {name[:100]!r} does not exist. There are: {', '.join(offered)}."
        raise ApiError(404, "model_not_found", text, param="model")
    return msgspec.json.encode(_model(name))


def _model(name: str) -> dict[str, object]:
    now = datetime.now(UTC).replace(microsecond=0)
    openai = {"id": name, "object": "model", "created": int(now.timestamp()), "owned_by": "farthing"}
    return openai | {"type": "model", "display_name": name, "created_at": now, "lifecycle": "active"}  # Anthropic's
