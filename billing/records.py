"""What the gateway hands to billing when a request is over: the spool's lines, later the ledger's rows."""

from datetime import datetime
from decimal import Decimal
from typing import Literal
from uuid import UUID

import msgspec

UsageSource = Literal["engine", "upstream", "estimated"]
Status = Literal["ok", "client_closed", "upstream_error", "refused", "invalid"]
"""How an operation or attempt ended.

`ok`: answered in full. `client_closed`: the caller went away; tokens are those it was sent. `upstream_error`: the
upstream failed or died; tokens are those delivered. `refused`: budget, limit or unpriced model, nothing was dispatched.
`invalid`: the request itself was wrong (4xx) after authentication, nothing was computed.
"""


class TokenClasses(msgspec.Struct, frozen=True, kw_only=True):
    """Five disjoint, non-negative token counts of one attempt."""

    input_fresh: int = 0
    input_cached: int = 0
    input_cache_write: int = 0
    output_text: int = 0
    output_reasoning: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.input_fresh + self.input_cached + self.input_cache_write

    @property
    def completion_tokens(self) -> int:
        return self.output_text + self.output_reasoning


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One call to one model on one upstream. Times in seconds; NULL money means unknown, never zero."""

    number: int
    """From 1 within its operation."""
    upstream: str
    model: str
    started_at: datetime
    status: Status
    http_status: int | None = None
    error: str | None = None
    tokens: TokenClasses = TokenClasses()
    usage_source: UsageSource
    generated_tokens: int | None = None
    recomputed_tokens: int | None = None
    prefill_device_seconds: float | None = None
    decode_device_seconds: float | None = None
    kv_block_seconds: float | None = None
    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    total_seconds: float
    preemptions: int | None = None
    price_version_id: UUID | None = None
    """Sale price the charge was made with."""
    cost_version_id: UUID | None = None
    billed: Decimal | None = None
    cost: Decimal | None = None


class OperationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One client request, settled. Its id (UUIDv7) is the trace id the client got."""

    id: UUID
    started_at: datetime
    org_id: UUID
    team_id: UUID | None
    user_id: UUID | None
    key_id: UUID
    tags: dict[str, str] = {}
    api: str = "chat.completions"
    requested_model: str
    model: str | None
    """The model that answered; None when none was chosen."""
    route_reasons: list[str] = []
    route_score: float | None = None
    stream: bool
    status: Status
    http_status: int
    finish_reason: str | None = None
    error: str | None = None
    ttft_seconds: float | None = None
    total_seconds: float
    billed: Decimal | None = None
    cost: Decimal | None = None
    currency: str
    attempts: list[AttemptRecord] = []
