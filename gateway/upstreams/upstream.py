"""One upstream: its address, its dialect (Farthing's engine or OpenAI-compatible), and what we may ask of it."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

import msgspec

from engine.protocol import REQUEST_ID_HEADER, TENANT_HEADER, TokenizeReply
from gateway.call import Call
from gateway.settings import UpstreamSettings
from gateway.upstreams.transport import BrokenError, HttpxTransport, Reply, Transport, UnreachableError

CONNECT_SECONDS = 5.0
PROBE_SECONDS = 2.0
TEMPLATE_TOKENS = 32
"""Tokens allowed for the chat template around one message, and once for the whole prompt, in the upper bound."""


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class PromptSize:
    """`tokens` is exact for an engine, an upper bound elsewhere. `context` in tokens, None when nobody told it."""

    tokens: int
    context: int | None


class Upstream:
    """`name` as configured. One per configured upstream, shared by all requests."""

    def __init__(self, name: str, settings: UpstreamSettings) -> None:
        self.name = name
        self.settings = settings
        self.is_engine = settings.kind == "engine"
        self._base = settings.base_url.rstrip("/")
        self._root = self._base.removesuffix("/v1")
        self._transport: Transport = HttpxTransport(CONNECT_SECONDS, settings.read_timeout_seconds)
        self._probe: Transport = HttpxTransport(PROBE_SECONDS, PROBE_SECONDS)
        key = settings.api_key()
        self._authorization = {"authorization": f"Bearer {key.get_secret_value()}"} if key else {}

    async def chat(self, body: bytes, request_id: str, tenant: UUID, trace: Mapping[str, str]) -> Reply:
        """Send a chat completion. Raises UnreachableError or BrokenError."""
        headers = {"content-type": "application/json", **trace, **self._authorization}
        if self.is_engine:
            headers[REQUEST_ID_HEADER] = request_id
            headers[TENANT_HEADER] = str(tenant)
        return await self._transport.send("POST", f"{self._base}/chat/completions", headers, body)

    def body(self, call: Call, model: str, max_output: int | None) -> bytes:
        """The caller's body with the model's own name; streams are asked for usage whether or not the caller asked.

        `max_output` is set when a budget caps an answer whose length the caller left open.
        """
        fields: dict[str, object] = {**call.fields, "model": model}
        if call.stream:
            options = msgspec.json.decode(call.fields.get("stream_options", b"{}")) or {}
            options["include_usage"] = True
            if self.is_engine:
                options["continuous_usage_stats"] = True
            fields["stream_options"] = options
        if max_output is not None:
            fields["max_tokens"] = max_output
            fields.pop("max_completion_tokens", None)
        return msgspec.json.encode(fields)

    async def tokenize(self, call: Call, model: str) -> Reply:
        """The engine's answer to `POST /tokenize` for this conversation. Raises UnreachableError or BrokenError."""
        content = msgspec.json.encode({"model": model, "messages": call.fields["messages"]})
        return await self._transport.send(
            "POST", f"{self._root}/tokenize", {"content-type": "application/json"}, content
        )

    async def abort(self, request_id: str) -> bool:
        """End a running request of the engine within one step. False when it did not know the id or did not answer."""
        content = msgspec.json.encode({"id": request_id})
        headers = {"content-type": "application/json"}
        with contextlib.suppress(UnreachableError, BrokenError):
            reply = await self._probe.send("POST", f"{self._base}/abort", headers, content)
            await reply.close()
            return reply.status == 200
        return False

    async def health(self) -> str | None:
        """None when it can serve, else why not. An upstream that is not ours is only asked whether it answers."""
        path = f"{self._root}/health" if self.is_engine else f"{self._base}/models"
        try:
            reply = await self._probe.send("GET", path, self._authorization, None)
        except (UnreachableError, BrokenError) as error:
            return f"does not answer: {error}"
        await reply.close()
        if reply.status >= 500 or (self.is_engine and reply.status != 200):
            return f"answers {reply.status} to a health check"
        return None

    async def hosted(self) -> set[str] | None:
        """The models that an engine has loaded; None when it did not say, or is not our engine."""
        if not self.is_engine:
            return None
        with contextlib.suppress(UnreachableError, BrokenError, msgspec.MsgspecError):
            reply = await self._probe.send("GET", f"{self._base}/models", self._authorization, None)
            try:
                body = await reply.read()
            finally:
                await reply.close()
            if reply.status == 200:
                return {entry.id for entry in msgspec.json.decode(body, type=_ModelList).data}
        return None

    async def close(self) -> None:
        await self._transport.close()
        await self._probe.close()


@dataclass(frozen=True, slots=True)
class Flight:
    """The request now at an upstream, so that it can be called back."""

    upstream: Upstream
    request_id: str

    async def abort(self) -> bool:
        """Ask the engine to end it now. False when it cannot be asked or does not know it (yet)."""
        return self.upstream.is_engine and await self.upstream.abort(self.request_id)


def prompt_upper_bound(call: Call, context: int | None) -> PromptSize:
    """For an upstream whose tokenizer we do not have: no byte-level tokenizer makes more tokens than there are bytes.

    Every byte of the messages' and tools' JSON counts as a token, and the template gets TEMPLATE_TOKENS a message.
    Media parts have no such bound: callers must not use it for them.
    """
    size = sum(len(bytes(call.fields[name])) for name in ("messages", "tools") if name in call.fields)
    return PromptSize(size + TEMPLATE_TOKENS * (len(call.messages) + 1), context)


def engine_prompt_size(body: bytes) -> PromptSize:
    reply = msgspec.json.decode(body, type=TokenizeReply)
    return PromptSize(reply.count, reply.max_model_len)
