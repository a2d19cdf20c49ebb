"""Why a call is not admitted: one exception a reason, each with a sentence for the caller."""

from datetime import datetime
from decimal import Decimal
from typing import NamedTuple

from billing.allowances import Allowance, LimitKind, ScopeKind
from billing.pots import EXACT


class BudgetError(Exception):
    """A hard budget refuses a call. `str()` is a sentence for the caller; `scope_id` is for the operator.

    `remaining` is what is left as far as this replica can know.
    """

    def __init__(self, terms: Allowance, remaining: Decimal, resets_at: datetime | None, sentence: str) -> None:
        super().__init__(sentence)
        self.scope_kind: ScopeKind = terms.scope_kind
        self.scope_id: str = terms.scope_id
        self.also: dict[ScopeKind, str] = terms.also
        self.limit: Decimal | None = None if terms.prepaid else terms.limit_amount
        self.remaining: Decimal = remaining
        self.currency: str | None = terms.currency
        self.window = terms.window
        self.resets_at: datetime | None = None if terms.prepaid else resets_at


class BudgetExhausted(BudgetError):  # noqa: N818 - the name of a state that callers know
    """The call's worst case does not fit in what is left."""


class WalletExhausted(BudgetExhausted):
    """The call's worst case does not fit in what is left of a prepaid wallet."""


class UnpricedError(BudgetError):
    """The call has no worst case, because its model has no (complete) price, and a hard budget applies."""


class OtherCurrencyError(BudgetError):
    """A hard budget is in another currency than the one that calls are charged in, so nothing can be compared."""


class Rate(NamedTuple):
    """A limit as a caller may be told of it, after its own call."""

    limit: int
    remaining: int
    """As far as this replica knows."""
    reset_seconds: float


class LimitExceeded(Exception):  # noqa: N818 - the name of a state that callers know
    """A limit refuses a call. `str()` is a sentence for the caller; `scope_id` is for the operator.

    `retry_after` is in seconds; None when the call alone asks for more than the limit, so that no wait helps.
    `rate` is the limit by the minute, without this call; None for calls at once, which have no window.
    """

    def __init__(
        self, kind: LimitKind, terms: Allowance, retry_after: float | None, sentence: str, rate: Rate | None = None
    ) -> None:
        super().__init__(sentence)
        self.kind: LimitKind = kind
        self.scope_kind: ScopeKind = terms.scope_kind
        self.scope_id: str = terms.scope_id
        self.also: dict[ScopeKind, str] = terms.also
        self.limit: int = int(terms.limit_amount)
        self.retry_after: float | None = retry_after
        self.rate: Rate | None = rate


CONCURRENT_RETRY_SECONDS = 1.0
"""When a call at once too many may try again: nobody can know when another one ends."""


def unpriced(terms: Allowance, remaining: Decimal, resets_at: datetime | None) -> UnpricedError:
    nature = "cannot go below zero" if terms.prepaid else "is hard"
    sentence = f"the model has no complete price and {_budget(terms)} {nature}"
    return UnpricedError(terms, remaining, resets_at, sentence)


def other_currency(
    terms: Allowance, remaining: Decimal, resets_at: datetime | None, currency: str
) -> OtherCurrencyError:
    sentence = f"{_budget(terms)} cannot pay for calls that are charged in {currency}"
    return OtherCurrencyError(terms, remaining, resets_at, sentence)


def exhausted(terms: Allowance, amount: Decimal, remaining: Decimal, resets_at: datetime | None) -> BudgetExhausted:
    resets = "" if resets_at is None or terms.prepaid else f"; it resets at {resets_at:%Y-%m-%d %H:%M} UTC"
    cost, left = f"{_plain(amount)} {terms.currency}", f"{_plain(remaining)} left"
    sentence = f"this call could cost {cost} and {_budget(terms)} has {left}{resets}"
    kind = WalletExhausted if terms.prepaid else BudgetExhausted
    return kind(terms, remaining, resets_at, sentence)


def exceeded(terms: Allowance, amount: Decimal, remaining: Decimal, reset_seconds: float) -> LimitExceeded:
    """What refuses a call that needs `amount` of a limit."""
    whose, limit = f"{terms.whose} limit", terms.limit_amount
    too_much = amount > limit
    if terms.unit == "concurrent":
        wait = CONCURRENT_RETRY_SECONDS
        sentence = f"{whose} of {limit:f} calls at the same time is reached"
        return LimitExceeded("concurrent", terms, None if too_much else wait, sentence)
    rate = Rate(int(limit), int(remaining), reset_seconds)
    if terms.unit == "requests":
        sentence = f"{whose} of {limit:f} requests a minute is reached"
        return LimitExceeded("requests", terms, None if too_much else reset_seconds, sentence, rate)
    sentence = f"this call could use {amount:f} tokens and {whose} of {limit:f} tokens a minute has {remaining:f} left"
    return LimitExceeded("tokens", terms, None if too_much else reset_seconds, sentence, rate)


def _plain(amount: Decimal) -> str:
    """Without zeros at its end: they come of how leases are cut, and say nothing."""
    return f"{amount.normalize(EXACT):f}"


def _budget(terms: Allowance) -> str:
    if terms.prepaid:
        return f"{terms.whose} wallet in {terms.currency}"
    window = "" if terms.window == "none" else f" by the {terms.window}"
    return f"{terms.whose} budget of {terms.limit_amount:f} {terms.currency}{window}"
