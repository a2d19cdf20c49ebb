"""What is known of one request while it runs, and the row it becomes when it is over."""

import asyncio
import time
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import msgspec

from billing.charge import total
from billing.ids import new_written_id
from billing.in_flight import Slot
from billing.leases import Hold
from billing.people import Principal
from billing.prices import Payer, PriceBook, Tier
from billing.records import (
    UNSETTLED,
    AttemptRecord,
    CachedAnswer,
    OperationRecord,
    Status,
    TokenClasses,
    UsageSource,
)
from engine.protocol import Account
from gateway.attribution import Attribution
from gateway.call import Call, storable
from gateway.routing.router import Role
from gateway.upstreams.frames import Frame
from gateway.upstreams.target import Flight
from gateway.upstreams.usage import Usage

CLIENT_CLOSED_STATUS = 499
"""The status nobody was there to read; nginx's number for it."""
KILLED = "the gateway was killed in the middle of the answer"


_now = partial(datetime.now, UTC)


class Attempt(msgspec.Struct, eq=False):
    """One call to one model on one upstream, while it runs. `usage`: last seen; `account`: the engine's word."""

    number: int
    upstream: str
    model: str
    is_engine: bool
    """Only an engine of ours is believed about what it computed (`account`)."""
    started_at: datetime = msgspec.field(default_factory=_now)
    started: float = msgspec.field(default_factory=time.monotonic)
    ended: float | None = None
    status: Status = "ok"
    http_status: int | None = None
    error: str | None = None
    refused: bool = False
    """The upstream answered with an error before it computed anything."""
    usage: Usage | None = None
    account: Account | None = None
    odd: str | None = None
    """What was odd in the reported counts."""
    served_standard: bool = False
    """The upstream says that it was served at the standard tier."""
    billable: bool = True
    """False where another attempt took its place: it may have cost something, but the caller pays once."""
    overdue: bool = False
    """It was called back because its whole answer took too long."""
    cut: bool = False
    """Its answer was ended before the upstream ended it, because its reservation was used up."""
    delivered: Usage | None = None
    """Usage as of the last frame that the caller was sent."""
    delivered_characters: int = 0
    unreported_characters: int = 0
    """Of those, how many came after `delivered`, which does not count them."""
    first_token: float | None = None

    def saw(self, frame: Frame) -> None:
        """Keep what the upstream reports in this frame."""
        if frame.usage is not None:
            self.usage = frame.usage
        if frame.odd is not None:
            self.odd = frame.odd
        if frame.served_standard:
            self.served_standard = True
        if frame.account is not None and self.is_engine:
            self.account = frame.account

    def noted(self, words: str) -> str:
        """An upstream's own words, as the ledger may keep them: others than our engine may quote the prompt."""
        return words if self.is_engine else "the upstream reported an error"

    def end(self, status: Status, error: str | None = None) -> None:
        self.status = status
        self.error = storable(error) if error else None
        self.ended = time.monotonic()


class Priced(msgspec.Struct, frozen=True):
    """An attempt's tokens and money, as settled."""

    tokens: TokenClasses
    usage_source: UsageSource
    usage_flag: str | None
    billed: Decimal | None
    cost: Decimal | None
    price_version_id: UUID | None
    cost_version_id: UUID | None
    price_override_id: UUID | None = None
    tier: Tier = "standard"
    images: int = 0
    billable: bool = True
    """Whether the caller pays for it, whatever the price."""

    @classmethod
    def unknown(cls) -> "Priced":
        """Where settling failed: there is a row, and its money is not known."""
        return cls(TokenClasses(), "estimated", UNSETTLED, None, None, None, None)


class Operation(msgspec.Struct, eq=False):
    """One client request. Its id is the trace id that the client gets."""

    api: str = "chat.completions"
    id: UUID = UUID(int=0)
    trace_id: str = ""
    """The id as it is written. Both are made with the operation."""
    started_at: datetime = msgspec.field(default_factory=_now)
    started: float = msgspec.field(default_factory=time.monotonic)
    serving: asyncio.Task[Any] | None = None
    """The task that serves it."""
    principal: Principal | None = None
    attribution: Attribution | None = None
    call: Call | None = None
    tier: Tier = "standard"
    """Which sale price it is billed at."""
    model: str | None = None
    role: Role | None = None
    score: float | None = None
    reasons: list[str] = []
    attempts: list[Attempt] = []
    status: Status = "ok"
    http_status: int = 200
    finish_reason: str | None = None
    error: str | None = None
    book: PriceBook | None = None
    """The prices it was admitted at: those it is settled at too, whatever changes meanwhile."""
    hold: Hold | None = None
    """What is held in budgets and limits until the row is written."""
    dropped: tuple[str, ...] = ()
    """Parameters that the upstream was not sent."""
    reserved_prompt: int | None = None
    """Tokens of the prompt that a hard budget holds money for; None where there is none."""
    reserved_output: int | None = None
    """Tokens of output, over all choices, that a hard budget holds money for; None where nothing bounds the answer."""
    flight: Flight | None = None
    """What is now at an upstream."""
    cached: CachedAnswer | None = None
    """Set where the answer came out of the response cache, instead of attempts."""
    cached_billed: Decimal | None = None
    """What it is billed then; None: unknown."""
    slot: Slot | None = None
    """Of a stream that has begun: the row it has if this process is killed."""
    priced: list[Priced] | None = None
    """Set when the row has been written."""

    def __post_init__(self) -> None:
        self.id, self.trace_id = new_written_id()

    @property
    def payer(self) -> Payer | None:
        """Whose overrides of the price apply."""
        who = self.principal
        return None if who is None else Payer(who.org_id, who.team_id, who.key_id)

    @property
    def route(self) -> str:
        """How the model was chosen: `auto/small`, `large`, or `direct`."""
        if self.role is None:
            return "direct"
        return f"auto/{self.role}" if self.score is not None else self.role

    def end(self, status: Status, http_status: int, error: str | None = None) -> None:
        self.status = status
        self.http_status = http_status
        self.error = storable(error) if error else None

    def note(self, text: str) -> None:
        """Something the row should say of an operation that did not fail."""
        self.error = storable(text)

    def record(self, priced: list[Priced], currency: str) -> OperationRecord:
        """The row. Call it once, with the settled attempts in order."""
        attempts = [_attempt_record(a, p, a.status, a.error) for a, p in zip(self.attempts, priced, strict=True)]
        billed = self.cached_billed if self.cached is not None else total([p.billed for p in priced])
        return self._row(attempts, self.status, self.error, billed, total([p.cost for p in priced]), currency)

    def begun(self, prompt_tokens: int, currency: str) -> OperationRecord:
        """The row of a stream whose gateway is killed: an estimate for the reader; nobody pays for it."""
        unpaid = Priced(TokenClasses(), "estimated", None, Decimal(0), None, None, None, billable=False)
        prompt = msgspec.structs.replace(unpaid, tokens=TokenClasses(input_fresh=prompt_tokens))
        *earlier, last = self.attempts
        attempts = [_attempt_record(attempt, unpaid, attempt.status, attempt.error) for attempt in earlier]
        attempts.append(_attempt_record(last, prompt, "upstream_error", KILLED))
        return self._row(attempts, "upstream_error", KILLED, Decimal(0), None, currency)

    def _row(
        self,
        attempts: list[AttemptRecord],
        status: Status,
        error: str | None,
        billed: Decimal | None,
        cost: Decimal | None,
        currency: str,
    ) -> OperationRecord:
        assert self.principal is not None, "only what was authenticated is recorded"
        first = next((a.first_token for a in self.attempts if a.first_token is not None), None)
        return OperationRecord(
            id=self.id,
            started_at=self.started_at,
            org_id=self.principal.org_id,
            team_id=self.principal.team_id,
            user_id=self.principal.user_id,
            key_id=self.principal.key_id,
            tags=self.attribution.tags if self.attribution else self.principal.tags,
            api=self.api,
            requested_model=storable(self.call.requested_model) if self.call else "",
            model=self.model,
            route_reasons=self.reasons,
            route_score=self.score,
            stream=self.call.stream if self.call else False,
            status=status,
            http_status=self.http_status,
            finish_reason=self.finish_reason,
            error=error,
            ttft_seconds=None if first is None else first - self.started,
            total_seconds=time.monotonic() - self.started,
            billed=billed,
            cost=cost,
            currency=currency,
            attempts=attempts,
            cached=self.cached,
            replica=self.hold.replica if self.hold else "",
            charges=self.hold.charges if self.hold else [],
        )


def _attempt_record(attempt: Attempt, priced: Priced, status: Status, error: str | None) -> AttemptRecord:
    account = attempt.account
    ttft = None if attempt.first_token is None else attempt.first_token - attempt.started
    if ttft is None and account:
        ttft = account.ttft_seconds
    return AttemptRecord(
        number=attempt.number,
        upstream=attempt.upstream,
        model=attempt.model,
        started_at=attempt.started_at,
        status=status,
        http_status=attempt.http_status,
        error=error,
        tokens=priced.tokens,
        usage_source=priced.usage_source,
        usage_flag=priced.usage_flag,
        generated_tokens=account.generated_tokens if account else None,
        recomputed_tokens=account.recomputed_tokens if account else None,
        prefill_device_seconds=account.prefill_device_seconds if account else None,
        decode_device_seconds=account.decode_device_seconds if account else None,
        kv_block_seconds=account.kv_block_seconds if account else None,
        queue_seconds=account.queue_seconds if account else None,
        ttft_seconds=ttft,
        total_seconds=(attempt.ended or time.monotonic()) - attempt.started,
        preemptions=account.preemptions if account else None,
        price_version_id=priced.price_version_id,
        cost_version_id=priced.cost_version_id,
        billed=priced.billed,
        cost=priced.cost,
        tier=priced.tier,
        images=priced.images,
        billable=priced.billable,
        price_override_id=priced.price_override_id,
    )
