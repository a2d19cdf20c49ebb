"""One upstream: its address, its dialect, its connections, and what we may ask of it besides answers."""

import asyncio
import contextlib
from collections.abc import Mapping
from urllib.parse import urlencode
from uuid import UUID

import msgspec

from engine.protocol import REQUEST_ID_HEADER, TENANT_HEADER, BlockChanges, DeviceAccount, TokenizeReply
from gateway.api.prompt import read_prompt
from gateway.call import Call
from gateway.settings import UpstreamSettings, UsageSettings
from gateway.upstreams.anthropic import AnthropicDialect, counted
from gateway.upstreams.client import HttpClient
from gateway.upstreams.dialect import Dialect, OpenAIDialect, Request
from gateway.upstreams.kinds import KINDS
from gateway.upstreams.transport import BrokenError, Reply, Transport, UnreachableError
from gateway.upstreams.usage_dialect import VendorUsage

PROBE_SECONDS = 2.0
HASHES_SECONDS = 0.5
"""Where a prompt is cached is not worth more than this."""
ACCOUNT_SECONDS = 5.0
JSON = {"content-type": "application/json"}
TEMPLATE_FIELDS = {
    "chat": ("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort"),
    "completion": ("prompt", "suffix"),
    "embedding": (),
}
"""What of a request decides the prompt's tokens, by the kind of call."""
NO_PROMPT = frozenset(
    {"model", "user", "metadata", "stop", "stop_sequences", "logit_bias", "stream_options", "service_tier"}
    | {"prompt_cache_key", "safety_identifier"}
)
"""Fields that no upstream makes a part of the prompt. Of others (`response_format`, `functions`, those that we do not
know) some do."""
TEMPLATE_TOKENS = 32
"""Tokens allowed for the chat template around one message, and once for the whole prompt, in the upper bound."""
TOOL_TOKENS = 1024
"""The same for what an upstream writes about tools in general: Anthropic's models get some hundred tokens of it."""


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class PromptSize(msgspec.Struct, frozen=True):
    """`tokens` is exact for an engine, an upper bound elsewhere.

    `room`: the most output tokens that can follow it in the context; `max_output`: the most that the model writes.
    None when nobody told.
    """

    tokens: int
    room: int | None
    max_output: int | None = None


class Upstream:
    """`name` as configured. One per configured upstream, shared by all requests. Raises ValueError without its key."""

    def __init__(self, name: str, settings: UpstreamSettings) -> None:
        self.name = name
        self.settings = settings
        self.is_engine = settings.kind == "engine"
        self.key = settings.api_key()
        self.dialect = _dialect(settings)
        self._in_flight = 0
        self._idle: asyncio.Event | None = None
        self._base = settings.base_url
        self._root = self._base.removesuffix("/v1")
        self._transport: Transport = HttpClient(
            connect=settings.connect_seconds,
            # A whole answer of an engine that takes longer is called back first (gateway/recall.py).
            first_byte=settings.first_byte_seconds + (ACCOUNT_SECONDS if self.is_engine else 0.0),
            idle=settings.idle_seconds,
            total=settings.total_seconds,
        )
        self._probe: Transport = HttpClient(connect=PROBE_SECONDS, first_byte=PROBE_SECONDS, idle=PROBE_SECONDS)
        self._authorization = self.dialect.headers(self.key.get_secret_value() if self.key else None)

    async def send(self, request: Request, request_id: str, tenant: UUID, trace: Mapping[str, str]) -> Reply:
        """Raises UnreachableError or BrokenError."""
        headers = {**JSON, **trace, **request.headers, **self._authorization}
        if self.is_engine:
            headers[REQUEST_ID_HEADER] = request_id
            headers[TENANT_HEADER] = str(tenant)
        return await self._transport.send("POST", self._base + request.path, headers, request.body)

    async def tokenize(self, call: Call, model: str) -> Reply:
        """The engine's answer to `POST /tokenize` for this prompt. Raises UnreachableError or BrokenError."""
        return await self._transport.send("POST", f"{self._root}/tokenize", JSON, _tokenize_body(call, model, False))

    async def counted(self, call: Call, model: str) -> int | None:
        """The exact length of a prompt by the upstream's own count, where it is not an engine; None where it has none.

        Raises UnreachableError, BrokenError or MalformedError.
        """
        if not isinstance(self.dialect, AnthropicDialect):
            return None
        request = self.dialect.count_request(call, model)
        headers = {**JSON, **request.headers, **self._authorization}
        answer = await _body(await self._transport.send("POST", self._base + request.path, headers, request.body))
        return None if answer is None else counted(answer)

    async def block_hashes(self, call: Call, model: str, tenant: UUID) -> list[str] | None:
        """The prompt's block hashes as the engine has them; None where it does not say, or not soon."""
        headers = {**JSON, TENANT_HEADER: str(tenant)}
        with contextlib.suppress(UnreachableError, BrokenError, TimeoutError, msgspec.MsgspecError):
            async with asyncio.timeout(HASHES_SECONDS):
                body = _tokenize_body(call, model, True)
                answer = await _body(await self._probe.send("POST", f"{self._root}/tokenize", headers, body))
                if answer is not None:
                    return msgspec.json.decode(answer, type=TokenizeReply).block_hashes
        return None

    async def block_changes(self, model: str, instance: str, since: int, wait: float) -> BlockChanges | None:
        """What has changed in the blocks an engine holds since a sequence number of this instance of it.

        Waits for news up to `wait` seconds. None when it does not say. Raises UnreachableError or BrokenError.
        """
        query = urlencode({"model": model, "instance": instance, "since": since, "wait": wait})
        reply = await self._transport.send("GET", f"{self._base}/blocks?{query}", {}, None)
        answer = await _body(reply)
        return None if answer is None else msgspec.json.decode(answer, type=BlockChanges)

    async def device(self) -> DeviceAccount | None:
        """What an engine's device has done; None when it does not say. Raises UnreachableError or BrokenError."""
        answer = await _body(await self._probe.send("GET", f"{self._base}/device", {}, None))
        return None if answer is None else msgspec.json.decode(answer, type=DeviceAccount)

    async def abort(self, request_id: str) -> bool:
        """End a running request of the engine within one step. False when it did not know the id or did not answer."""
        content = msgspec.json.encode({"id": request_id})
        with contextlib.suppress(UnreachableError, BrokenError):
            reply = await self._probe.send("POST", f"{self._base}/abort", JSON, content)
            await reply.close()
            return reply.status == 200
        return False

    async def health(self) -> str | None:
        """None when it can serve, else why not. An upstream that is not ours is only asked whether it answers."""
        path = self.dialect.health_path
        url = self._root + path[1:] if path.startswith("//") else self._base + path
        try:
            reply = await self._probe.send("GET", url, self._authorization, None)
        except (UnreachableError, BrokenError) as error:
            return f"does not answer: {error}"
        await reply.close()
        if reply.status >= 500 or (self.is_engine and reply.status != 200):
            return f"answers {reply.status} to a health check"
        if reply.status in (401, 403):
            return f"refuses its key ({reply.status})"
        return None

    async def hosted(self) -> set[str] | None:
        """The models that an engine has loaded; None when it did not say, or is not our engine."""
        if not self.is_engine:
            return None
        with contextlib.suppress(UnreachableError, BrokenError, msgspec.MsgspecError):
            answer = await _body(await self._probe.send("GET", f"{self._base}/models", self._authorization, None))
            if answer is not None:
                return {entry.id for entry in msgspec.json.decode(answer, type=_ModelList).data}
        return None

    def enter(self) -> None:
        """A request of whatever model goes there; it ends with `leave`."""
        self._in_flight += 1

    def leave(self) -> None:
        self._in_flight -= 1
        if self._idle is not None and not self._in_flight:
            self._idle.set()

    async def close_when_idle(self) -> None:
        """For an upstream that gets no further requests."""
        if self._in_flight:
            self._idle = asyncio.Event()
            await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        await self._transport.close()
        await self._probe.close()


def _dialect(settings: UpstreamSettings) -> Dialect:
    if settings.kind == "anthropic":
        return AnthropicDialect()
    kind = KINDS[settings.kind]
    usage = settings.usage or UsageSettings(cache=kind.cache, reasoning=kind.reasoning)
    dialect = VendorUsage(usage.cache, usage.reasoning, reports_cost=kind.reports_cost)
    return OpenAIDialect(settings.kind, dialect, settings.base_url, stream_options=settings.stream_options)


def _tokenize_body(call: Call, model: str, hashes: bool) -> bytes:
    fields: dict[str, object] = {name: call.fields[name] for name in TEMPLATE_FIELDS[call.kind] if name in call.fields}
    if hashes:
        fields["block_hashes"] = True
    return msgspec.json.encode({**fields, "model": model})


def can_tokenize(call: Call) -> bool:
    """Whether an engine's /tokenize takes this prompt: a conversation, or one text."""
    return call.kind == "chat" or (call.kind == "completion" and bytes(call.fields["prompt"]).lstrip()[:1] == b'"')


async def _body(reply: Reply) -> bytes | None:
    """The body of a 200, None of anything else."""
    try:
        return await reply.read() if reply.status == 200 else None
    finally:
        await reply.close()


def prompt_upper_bound(call: Call, context: int | None) -> PromptSize:
    """For an upstream whose tokenizer we do not have: no byte-level tokenizer makes more tokens than there are bytes.

    Every byte of JSON that may become part of the prompt counts as a token, and the template gets TEMPLATE_TOKENS a
    message and TOOL_TOKENS where there are tools. Each text of a list may fill the context.
    Media parts have no such bound: callers must not use it for them. The prompt may be much shorter than its bound, so
    all of the context may be left for the output.
    """
    size = _prompt_bytes(call.fields)
    if call.original is not None:  # either may be what is sent
        size = max(size, _prompt_bytes(call.original))
    around = TEMPLATE_TOKENS * (len(call.messages) + 1) + (TOOL_TOKENS if call.has_tools else 0)
    bound = size + around
    return PromptSize(bound if context is None else min(bound, context * _texts(call)), context)


def _prompt_bytes(body: Mapping[str, msgspec.Raw]) -> int:
    """Of texts, lists and objects; a number or a word like `true` is no part of a prompt."""
    size = 0
    for name, raw in body.items():
        if name not in NO_PROMPT:
            value = memoryview(raw)
            if value[0] in b'"[{':
                size += len(value)
    return size


def _texts(call: Call) -> int:
    """How many prompts a call has."""
    return (
        1 if call.kind == "chat" else len(read_prompt(call.fields, "prompt" if call.kind == "completion" else "input"))
    )


def engine_prompt_size(body: bytes) -> PromptSize:
    reply = msgspec.json.decode(body, type=TokenizeReply)
    return PromptSize(reply.count, max(reply.max_model_len - reply.count, 0))
