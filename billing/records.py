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


TOKEN_CLASSES = ("input_fresh", "input_cached", "input_cache_write", "output_text", "output_reasoning")
"""Names of the classes, in the order they are shown; also the names of columns and of prices per million."""

UNSETTLED = "it could not be settled; see the gateway's log"
"""`usage_flag` of an attempt of which not even the tokens are known: those in its row are no count."""


def refuse_bad_money(**amounts: Decimal | None) -> None:
    """Raise ValueError when an amount is negative, NaN or infinite: nothing here ever gives a credit."""
    for name, amount in amounts.items():
        if amount is not None and not (amount.is_finite() and amount >= 0):
            raise ValueError(f"{name} is {amount}: an amount must be a finite number, 0 or more")


class TokenClasses(msgspec.Struct, frozen=True, kw_only=True):
    """Five disjoint, non-negative token counts of one attempt. Raises ValueError on a negative count."""

    input_fresh: int = 0
    input_cached: int = 0
    input_cache_write: int = 0
    output_text: int = 0
    output_reasoning: int = 0

    def __post_init__(self) -> None:
        if min(msgspec.structs.astuple(self)) < 0:
            name, count = min(msgspec.structs.asdict(self).items(), key=lambda item: item[1])
            raise ValueError(f"{name} is {count}: a token count cannot be negative")

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
    usage_flag: str | None = None
    """What was inconsistent in the reported usage (see `billing.usage`); None when it added up."""
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
    tier: str = "standard"
    """Of the price: standard, batch or priority."""
    images: int = 0
    """In the prompt; 0 where nothing was answered."""
    billable: bool = True
    """False where the caller does not pay for it, whatever the price: another attempt answered in its place, or the
    upstream failed and reported nothing, so that its tokens are an estimate for the reader alone."""
    price_override_id: UUID | None = None
    """The org's, team's or key's own price or factor, where one was used."""

    def __post_init__(self) -> None:
        refuse_bad_money(billed=self.billed, cost=self.cost)


CACHED_ANSWER_NUMBER = 0
"""Stands, where an attempt has its number, for an answer from the response cache, which has no attempt."""


class CachedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """That an operation's answer came out of the response cache, and what the one that it was made for came to."""

    cached_from: UUID
    """The operation that it was made for."""
    saved_prompt_tokens: int
    saved_completion_tokens: int
    saved_billed: Decimal | None
    """What that operation's caller was billed for it; None: unknown."""
    saved_cost: Decimal | None
    """What it cost the operator; None: unknown."""
    price_version_id: UUID | None
    """Sale price that this operation was charged with."""
    price_override_id: UUID | None

    def __post_init__(self) -> None:
        refuse_bad_money(saved_billed=self.saved_billed, saved_cost=self.saved_cost)


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """One budget that an operation counts in, in the window that it was admitted in."""

    budget_id: UUID
    starts_at: datetime
    held: Decimal
    """What its hold took out of the replica's lease; 0 under a soft budget."""


NO_COLUMNS = frozenset({"attempts", "cached", "replica", "charges"})
"""Fields of an operation's record that the ledger keeps elsewhere, not at all, or (`cached`) taken apart."""


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
    cached: CachedAnswer | None = None
    replica: str = ""
    """Whose leases the charges were held in: `Hold.replica`."""
    charges: list[Charge] = []
    """Where `billed` counts: `Hold.charges`."""

    def __post_init__(self) -> None:
        refuse_bad_money(billed=self.billed, cost=self.cost)
        if len(self.attempts) > 1 and len({attempt.number for attempt in self.attempts}) != len(self.attempts):
            raise ValueError("two attempts of one operation have the same number")
