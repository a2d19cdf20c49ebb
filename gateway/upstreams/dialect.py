"""How to ask an upstream: what a call becomes on the wire, and how its answer is read."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from gateway.call import Call
from gateway.errors import ApiError
from gateway.upstreams.frames import ChatDecoder, Decoder, Frame, UsageDialect
from gateway.upstreams.kinds import KINDS, KindName
from gateway.upstreams.usage import Usage

_PATHS = {"chat": "/chat/completions", "completion": "/completions", "embedding": "/embeddings"}
_ASK_FOR_USAGE = msgspec.Raw(b'{"include_usage":true}')
_ASK_ENGINE = msgspec.Raw(b'{"include_usage":true,"continuous_usage_stats":true}')


class Request(msgspec.Struct, frozen=True, eq=False):
    """What is sent. `path` is under the upstream's base_url; `dropped` names parameters that were left out."""

    path: str
    body: bytes
    dropped: tuple[str, ...] = ()
    headers: Mapping[str, str] = MappingProxyType({})
    """Beside those that every request has."""


class Limits(msgspec.Struct, frozen=True):
    """Tokens of output, for each choice, where they are known."""

    cap: int | None = None
    """What the answer must not exceed."""
    usual: int | None = None
    """The most that the model writes: for an upstream that wants a limit where the caller gave none."""


class Dialect(Protocol):
    @property
    def health_path(self) -> str:
        """Asked whether the upstream is there: under its base_url, or of the whole server where it starts with //."""
        ...

    def request(self, call: Call, model: str, limits: Limits, drop: bool) -> Request:
        """`call` for the upstream's `model`.

        Raises ApiError 400 naming a parameter that this upstream cannot honour, unless `drop` allows to leave it out.
        """
        ...

    def headers(self, key: str | None) -> dict[str, str]: ...

    def decoder(self, call: Call) -> Decoder:
        """A new one, for one answer to `call`."""
        ...


class OpenAIDialect:
    """What every OpenAI-compatible upstream speaks, with the differences that its kind is known for."""

    def __init__(self, kind: KindName, usage: UsageDialect, base_url: str, *, stream_options: bool = True) -> None:
        facts = KINDS[kind]
        self.health_path = facts.health
        self._kind = kind
        self._usage = usage
        self._refuses = facts.refuses
        self._renames_limit = not facts.completion_limit
        self._limit = "max_completion_tokens" if _wants_the_new_limit(base_url) else "max_tokens"
        self._stream_options = stream_options
        self._is_engine = kind == "engine"
        self._options = _ASK_ENGINE if kind == "engine" else _ASK_FOR_USAGE

    def request(self, call: Call, model: str, limits: Limits, drop: bool) -> Request:
        fields: dict[str, Any] = {**call.fields, "model": model}
        dropped = call.leave_unsaid(drop)
        if self._refuses:
            names = [
                name for name, neutral in self._refuses.items() if name in fields and bytes(fields[name]) not in neutral
            ]
            dropped += leave_out(names, self._kind, drop)
            for name in names:
                del fields[name]
        if call.stream and self._stream_options:
            asked = call.fields.get("stream_options")
            fields["stream_options"] = self._options if asked is None else self._with_usage(asked)
        elif not self._stream_options:
            fields.pop("stream_options", None)
        if self._renames_limit and (limit := fields.pop("max_completion_tokens", None)) is not None:
            fields["max_tokens"] = limit
        elif self._limit == "max_completion_tokens" and call.kind == "chat" and "max_completion_tokens" not in fields:
            self._rename_limit(fields)
        if self._is_engine and call.priority is not None:
            fields["priority"] = call.priority
            if call.priority < 0:  # how an engine is asked for `service_tier: "priority"`
                fields.pop("service_tier", None)
        if self._kind == "ollama" and bytes(fields.get("max_tokens", b"null")) == b"0":
            raise ApiError(
                400, "invalid_value", "`max_tokens` must be at least 1: Ollama reads 0 as no limit.", param="max_tokens"
            )
        if limits.cap is not None:
            fields.pop("max_completion_tokens", None)
            fields.pop("max_tokens", None)
            fields[self._limit if call.kind == "chat" else "max_tokens"] = limits.cap
        return Request(_PATHS[call.kind], msgspec.json.encode(fields), dropped)

    def headers(self, key: str | None) -> dict[str, str]:
        return {} if key is None else {"authorization": f"Bearer {key}"}

    def decoder(self, call: Call) -> Decoder:
        return LlamaDecoder(self._usage) if self._kind == "llama.cpp" else ChatDecoder(self._usage)

    def _rename_limit(self, fields: dict[str, Any]) -> None:
        if (limit := fields.pop("max_tokens", None)) is not None:
            fields["max_completion_tokens"] = limit

    def _with_usage(self, asked: msgspec.Raw) -> dict[str, Any]:
        """The caller's own options; streams are asked for usage whether or not the caller asked."""
        options: dict[str, Any] = msgspec.json.decode(asked) or {}
        options["include_usage"] = True
        if self._is_engine:
            options["continuous_usage_stats"] = True
        return options


def leave_out(names: Sequence[str], kind: KindName, drop: bool) -> tuple[str, ...]:
    """Names of what an upstream does without. Raises ApiError 400 where that is not allowed."""
    if names and not drop:
        text = (
            f"`{names[0]}` cannot be honoured by this model's upstream (kind {kind}). Leave it out, choose another"
            " model, or ask your operator for drop_params."
        )
        raise ApiError(400, "unsupported_parameter", text, param=names[0].partition(" ")[0])
    return tuple(names)


class LlamaDecoder(ChatDecoder):
    """Builds of llama.cpp's server from before 2026 tell what came from the cache in `timings` alone."""

    def whole(self, body: bytes) -> Frame:
        frame = super().whole(body)
        usage = frame.usage
        if usage is not None and not usage.cached_tokens and b'"timings"' in body:
            cached = _cached_by_timings(body)
            if cached:
                frame.usage = Usage.of(usage.prompt_tokens, usage.completion_tokens, cached=cached)
        return frame


class _Timings(msgspec.Struct):
    cache_n: int = 0


class _Timed(msgspec.Struct):
    timings: _Timings | None = None


def _cached_by_timings(body: bytes) -> int:
    try:
        timings = msgspec.json.decode(body, type=_Timed).timings
    except msgspec.ValidationError:
        return 0
    return 0 if timings is None else timings.cache_n


def _wants_the_new_limit(base_url: str) -> bool:
    """OpenAI's newer models refuse `max_tokens`; who only imitates OpenAI may ignore `max_completion_tokens`."""
    host = urlsplit(base_url).hostname or ""
    return host.endswith((".openai.com", ".azure.com"))
