"""Holds: one call's part of this replica's leases, from its admission to its settlement."""

from collections.abc import Iterable
from decimal import Decimal
from uuid import UUID

import msgspec

from billing import refusals
from billing.lease_pool import Pool
from billing.pots import EXACT, NOTHING, ONE, Account, Pot
from billing.records import Charge
from billing.refusals import BudgetError, LimitExceeded, Rate


class Need(msgspec.Struct, frozen=True):
    """What a call asks for, besides one request and one place among the calls at once."""

    amount: Decimal | None
    """Worst case in money; None: the model has no price. 0 passes every budget."""
    tokens: int
    """Prompt and the most output."""


class Part(msgspec.Struct, frozen=True, eq=False):
    """What a call needs of one allowance."""

    account: Account
    pot: Pot
    amount: Decimal

    @property
    def short(self) -> bool:
        """Whether the lease does not have it. Nothing always fits: a free model passes an exhausted budget."""
        return self.amount > self.pot.free and self.amount > 0


class Hold:
    """What an admitted call holds. Give it to `Leases.settle` or `Leases.release`, once."""

    __slots__ = ("charges", "operation_id", "parts", "replica", "requests", "tokens")

    def __init__(self, operation_id: UUID, replica: str, parts: list[Part], now: float) -> None:
        self.operation_id = operation_id
        self.replica = replica
        self.parts = parts
        """Empty once it is settled or released."""
        self.charges: list[Charge] = []
        """For the operation's row: where its charge counts."""
        self.requests: Rate | None = None
        """The tightest limit of requests by the minute, if there is one."""
        self.tokens: Rate | None = None
        """Likewise of tokens."""
        for part in parts:
            account, pot, amount = part.account, part.pot, part.amount
            pot.free = EXACT.subtract(pot.free, amount)
            pot.open += 1
            pot.used = now
            if account.unit == "money":
                self.charges.append(Charge(budget_id=pot.key[0], starts_at=pot.key[1], held=amount))
            elif account.unit == "requests":
                self.requests = _tighter(self.requests, account, pot, now)
            elif account.unit == "tokens":
                self.tokens = _tighter(self.tokens, account, pot, now)

    def settle(self, billed: Decimal | None, tokens: int) -> None:
        """Keep what was billed and used; the rest is free again, and a place among the calls at once."""
        for part in self._end():
            unit, pot, amount = part.account.unit, part.pot, part.amount
            if unit == "money":
                pot.add(EXACT.subtract(amount, min(billed or NOTHING, amount)))
            elif unit == "tokens":
                pot.add(EXACT.subtract(amount, Decimal(tokens)))
            elif unit == "concurrent":
                pot.add(amount)

    def release(self) -> None:
        for part in self._end():
            part.pot.add(part.amount)

    def _end(self) -> list[Part]:
        """The parts, for the first who asks."""
        parts, self.parts = self.parts, []
        for part in parts:
            part.pot.open -= 1
        return parts


def _tighter(rate: Rate | None, account: Account, pot: Pot, now: float) -> Rate:
    left = max(int(pot.reach), 0)
    if rate is not None and rate.remaining <= left:
        return rate
    return Rate(int(account.terms.limit_amount), left, pot.ends - now)


def parts_of(pool: Pool, accounts: Iterable[Account], need: Need, currency: str, now: float) -> list[Part]:
    """What the call needs of each allowance. Raises OtherCurrencyError and UnpricedError."""
    parts = []
    unpriced: Account | None = None
    for account in accounts:
        amount: Decimal | None
        if account.unit == "money":
            if account.terms.currency != currency:
                if account.terms.hard:
                    raise other_currency(pool, account, currency, now)
                continue  # what it counts could not be compared
            amount = need.amount if account.terms.hard else NOTHING
            if amount is None:
                unpriced = account
                continue
        elif account.unit == "tokens":
            amount = Decimal(need.tokens)
        else:
            amount = ONE
        parts.append(Part(account, pool.pot(account, now), amount))
    if unpriced is not None:
        pot = pool.pot(unpriced, now)
        raise refusals.unpriced(unpriced.terms, pot.reach, pot.ends_at)
    return parts


def other_currency(pool: Pool, account: Account, currency: str, now: float) -> BudgetError:
    pot = pool.pot(account, now)
    return refusals.other_currency(account.terms, pot.reach, pot.ends_at, currency)


def refusal(parts: list[Part], now: float) -> BudgetError | LimitExceeded:
    """Of all that a call did not get: the fullest budget, where waiting does not help, else the fullest limit."""
    part = min(parts, key=lambda part: (part.account.unit != "money", part.pot.reach))
    terms, remaining = part.account.terms, max(part.pot.reach, NOTHING)
    if terms.unit == "money":
        return refusals.exhausted(terms, part.amount, remaining, part.pot.ends_at)
    return refusals.exceeded(terms, part.amount, remaining, part.pot.ends - now)
