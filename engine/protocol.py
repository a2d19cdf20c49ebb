"""The engine's wire types: what crosses HTTP between the engine and whoever calls it.

The only part of `engine` that `gateway` may import, so it depends on msgspec alone.
"""

import msgspec

REQUEST_ID_HEADER = "x-farthing-request-id"
"""Caller-chosen id of a request, the one `POST /v1/abort` takes."""

TENANT_HEADER = "x-farthing-tenant"
"""Tenant whose KV blocks this request may share; salts every block hash. Absent means the empty tenant."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What one finished (or aborted) request used. Tokens are counts, times are seconds.

    `input_fresh + input_cached + input_cache_write == prompt_tokens` always holds; the hits in `input_cached` are
    frozen when the request is first admitted, so a recompute after preemption never counts as a hit.
    """

    input_fresh: int
    input_cached: int
    input_cache_write: int = 0
    output_text: int
    """Tokens whose text was handed to the caller ("delivered")."""
    output_reasoning: int = 0
    generated_tokens: int
    """Tokens sampled, delivered or not (an abort or a stop string can leave some undelivered)."""
    recomputed_tokens: int = 0
    """Prompt and output tokens computed again after a preemption."""
    prefill_device_seconds: float
    decode_device_seconds: float
    kv_block_seconds: float
    """Integral over time of the KV blocks this request referenced."""
    queue_seconds: float
    ttft_seconds: float | None
    """Arrival to first sampled token; None when there was none."""
    mean_inter_token_seconds: float | None = None
    """From one sampled token to the next, on average; None when there were not two."""
    max_inter_token_seconds: float | None = None
    total_seconds: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.input_fresh + self.input_cached + self.input_cache_write

    @property
    def completion_tokens(self) -> int:
        return self.output_text + self.output_reasoning


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's `usage` object. `total_tokens == prompt_tokens + completion_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, account: Account) -> "Usage":
        return cls(
            account.prompt_tokens,
            account.completion_tokens,
            account.prompt_tokens + account.completion_tokens,
            PromptTokensDetails(account.input_cached),
            CompletionTokensDetails(account.output_reasoning),
        )


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object. `type` is `invalid_request_error`, `server_error`, …; `code` a stable machine word."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class TokenizeReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Answer of `POST /tokenize`: how many tokens a prompt or a conversation has, template included."""

    count: int
    max_model_len: int
    tokens: list[int]
    block_hashes: list[str] | None = None
    """Where they were asked for: of its full blocks for this tenant, as `BlockChanges` names blocks."""


class DeviceAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/device`: what the device has done for this engine process, in seconds since its models loaded.

    The device-seconds of all requests' accounts + `idle_seconds` == `wall_seconds`, within the step that runs.
    """

    instance: str
    """Another one after a restart, which counts from 0."""
    wall_seconds: float
    idle_seconds: float


class BlockChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/blocks`: what has changed in the blocks that an engine holds for one model.

    A block is named by the first 16 hex digits of its hash: enough to tell blocks apart for balancing, and nothing a
    tenant's text could be guessed from, as its salt is part of it.
    """

    instance: str
    """Another one after a restart: its numbers begin anew."""
    sequence: int
    """Ask with this next."""
    reset: bool
    """`added` is all there is: forget what was known before."""
    added: list[str]
    removed: list[str]
