"""What the gateway says when it cannot answer: one exception a kind of ending, each with a sentence for the caller.

Refusals by a budget or a limit have one shape: 402 or 429, `outcome` "refused", a message that names the scope and its
limit, and one header that says whether asking again helps: `Retry-After` with seconds, or `x-should-retry: false`. The
vendors' SDKs obey both; without them they would send a refused request three times.
"""

import math
from typing import Literal

from billing.leases import (
    BudgetError,
    BudgetExhausted,
    LimitExceeded,
    OtherCurrencyError,
    UnpricedError,
    WalletExhausted,
)
from billing.records import Status
from gateway.rate_headers import rate_headers

LONGEST_RETRY_SECONDS = 60
"""The vendors' SDKs obey no longer Retry-After: they would ask again within seconds instead."""
NO_RETRY = {"x-should-retry": "false"}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class ClientGoneError(Exception):
    """The caller closed its connection before the answer was complete."""


class ApiError(Exception):
    """An answer that is an error. Wire formats turn it into their own shape; the pipeline into the operation's row.

    `outcome` is the row's status: `invalid` (the request is wrong), `refused` (budget, limit, price), `upstream_error`.
    `type` is OpenAI's error type, by default the one that goes with the status. `noted` is what the ledger may keep:
    the message, unless that quotes an upstream, which may quote the prompt.
    """

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        param: str | None = None,
        outcome: Status = "invalid",
        headers: dict[str, str] | None = None,
        type: str | None = None,
        noted: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.outcome: Status = outcome
        self.headers = headers or {}
        self.type = type or _openai_type(status)
        self.noted = message if noted is None else noted
        self.request_id: str | None = None
        """The operation's, once it is told to a caller."""

    @property
    def anthropic_type(self) -> str:
        """Anthropic's error type."""
        return _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")


def _openai_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {402: "insufficient_quota", 429: "requests"}.get(status, "invalid_request_error")


class UpstreamReplyError(ApiError):
    """The upstream's own error answer, handed to the caller as it came."""

    def __init__(
        self, status: int, body: bytes, message: str, headers: dict[str, str], noted: str | None = None
    ) -> None:
        noted = noted or f"the upstream answered {status}"
        super().__init__(status, None, message, outcome="invalid", headers=headers, noted=noted)
        self.body = body


def unavailable(what: str, *, retry_after: int = 2) -> ApiError:
    """503 with Retry-After: something the gateway needs is away and is expected back."""
    message = f"{what} Try again in {retry_after} seconds."
    headers = {"retry-after": str(retry_after)}
    return ApiError(503, "service_unavailable", message, outcome="upstream_error", headers=headers)


_BUDGET_REFUSALS: dict[type[BudgetError], tuple[str, str]] = {
    BudgetExhausted: ("insufficient_quota", "Lower max_tokens, or ask your operator to raise the budget."),
    WalletExhausted: ("insufficient_quota", "Lower max_tokens, or ask your operator to top it up."),
    UnpricedError: ("unpriced_model", "Choose another model, or ask your operator for a price."),
    OtherCurrencyError: ("budget_currency", "Ask your operator to remove it and to set one in that currency."),
}
"""Code of the error and what the caller can do."""


def budget_refusal(error: BudgetError) -> ApiError:
    """402 for a budget's refusal."""
    code, advice = _BUDGET_REFUSALS[type(error)]
    text = f"Refused: {error}{_whose(error)}. {advice}"
    return ApiError(402, code, text, outcome="refused", headers=dict(NO_RETRY))


def limit_refusal(error: LimitExceeded) -> ApiError:
    """429 for a rate limit's refusal. It is where a client needs what the limit leaves most, to pace itself."""
    if error.retry_after is None:
        advice = "Waiting does not help: send less at once, or ask your operator to raise the limit."
        headers = dict(NO_RETRY)
    else:
        seconds = max(math.ceil(error.retry_after), 1)
        advice = f"Try again in {seconds} second{'s' if seconds > 1 else ''}."
        headers = {"retry-after": str(seconds)} | (NO_RETRY if seconds > LONGEST_RETRY_SECONDS else {})
    text = f"Refused: {error}{_whose(error)}. {advice}"
    kind: Literal["requests", "tokens"] = "tokens" if error.kind == "tokens" else "requests"
    if error.rate is not None:
        headers |= rate_headers(kind, error.rate)
    return ApiError(429, "rate_limit_exceeded", text, outcome="refused", headers=headers, type=kind)


def _whose(error: BudgetError | LimitExceeded) -> str:
    """Which tag or model; the ids of orgs, teams, users and keys say nothing to a caller."""
    scopes = {error.scope_kind: error.scope_id, **error.also}
    named = [f"{kind} {identifier}" for kind, identifier in scopes.items() if kind in ("tag", "model")]
    return f" ({', '.join(named)})" if named else ""
