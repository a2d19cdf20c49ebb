"""Leases: what this replica may spend without asking anyone, of every budget and limit that applies to its calls.

A replica takes a slice out of a window, holds parts of it for calls, in memory, and gives back what is left when it is
idle, when another replica asks, and at the end. A call waits for the database only where the lease does not suffice;
then one background task (`billing.lease_rounds`) asks for all calls that wait, at once. Where the window has no more
either, other replicas are asked to give back what they do not use, and the call is refused when that brought nothing.

The ledger moves what was charged from leased to settled (`billing.settlements`). The lease of a process that died stays
counted until the next process on its spool has copied what was spooled.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import NoReturn, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.allowances import ScopeKind, Unit
from billing.holds import Hold, Need, Part, other_currency, parts_of, refusal
from billing.lease_pool import Pool
from billing.lease_rounds import Rounds
from billing.lease_store import Store
from billing.notices import Notices
from billing.pots import EXACT, NOTHING
from billing.records import refuse_bad_money
from billing.refusals import (
    BudgetError,
    BudgetExhausted,
    LimitExceeded,
    OtherCurrencyError,
    Rate,
    UnpricedError,
    WalletExhausted,
)
from billing.waiting import Waiters, Waiting

__all__ = [
    "BudgetError",
    "BudgetExhausted",
    "Hold",
    "Leases",
    "Left",
    "LimitExceeded",
    "Need",
    "OtherCurrencyError",
    "Rate",
    "UnpricedError",
    "WalletExhausted",
]

ASK_SECONDS = 0.3
"""How long other replicas have to give back what a call here needs."""
ASK_AGAIN_SECONDS = 0.1
BARREN_SECONDS = 1.0
"""After that brought nothing, how long nobody is asked again; and how long it is believed that a window has no more."""

T = TypeVar("T")


class Left(msgspec.Struct, frozen=True):
    """The least that is left in a hard budget, and in a limit of tokens, of all that apply; None: there is none."""

    money: Decimal | None
    tokens: int | None


class Leases:
    """Admits calls against budgets and limits, for one gateway process.

    `replica` is the process's `Spool.replica`. `currency` is what calls are charged in. Make it before `notices` run;
    `run` must be running.
    """

    def __init__(self, engine: AsyncEngine, replica: str, currency: str, notices: Notices) -> None:
        self._pool = Pool()
        self._waiters = Waiters()
        self._rounds = Rounds(Store(engine, replica), self._pool, notices, self._waiters, replica)
        self._replica = replica
        self._currency = currency

    def admit_at_hand(self, operation_id: UUID, scopes: Mapping[ScopeKind, Sequence[str]], need: Need) -> Hold | None:
        """Hold what the call needs in every budget and limit that a scope has, or in none.

        None where the database has to be asked first: a scope is not known or the leases do not suffice. Then call
        `admit_waiting`, which asks it.

        `scopes` maps a kind to ids. Soft budgets count the call and never refuse; one in another currency does not
        count it. Raises BudgetExhausted, LimitExceeded, UnpricedError when the amount is unknown under a hard budget,
        OtherCurrencyError; ValueError on a negative amount.
        """
        refuse_bad_money(amount=need.amount)
        return self._hold(operation_id, scopes, need, None)

    async def admit_waiting(self, operation_id: UUID, scopes: Mapping[ScopeKind, Sequence[str]], need: Need) -> Hold:
        """The same, when the database has been asked. Raises its errors too, as they come."""
        return await self._wait(lambda waiting: self._hold(operation_id, scopes, need, waiting))

    def left_at_hand(self, scopes: Mapping[ScopeKind, Sequence[str]]) -> Left | None:
        """What is left for these scopes, as far as this replica knows; None where `left` has to ask the database.

        Raises OtherCurrencyError.
        """
        now = time.monotonic()
        accounts = self._pool.matching.find(scopes)
        if accounts is None:
            return None
        least: dict[Unit, Decimal] = {}
        unseen = False
        for account in accounts:
            unit = account.unit
            if unit not in ("money", "tokens") or not account.terms.hard:
                continue
            if unit == "money" and account.terms.currency != self._currency:
                raise other_currency(self._pool, account, self._currency, now)
            pot = self._pool.pot(account, now)
            if pot.seen < 0:
                self._pool.refill(account)
                unseen = True
            left, known = pot.reach, least.get(unit)
            if known is None or left < known:
                least[unit] = max(left, NOTHING)
        if unseen:
            return None
        tokens = least.get("tokens")
        return Left(least.get("money"), None if tokens is None else int(tokens))

    async def left(self, scopes: Mapping[ScopeKind, Sequence[str]]) -> Left:
        """The same; waits for the database where it must, and raises its errors as they come."""
        found = self.left_at_hand(scopes)
        return found if found is not None else await self._wait(lambda _: self.left_at_hand(scopes))

    def settle(self, hold: Hold, billed: Decimal | None, tokens: int) -> None:
        """The call is over and its row is spooled: keep what it was billed and used, the rest is free again.

        `billed` must be what the row says: the ledger takes it off the lease. None counts nothing.
        """
        hold.settle(billed, tokens)
        self._waiters.wake()

    def release(self, hold: Hold) -> None:
        """No row will be recorded: all that it held is free again."""
        hold.release()
        self._waiters.wake()

    async def run(self) -> NoReturn:
        """Learn, lease, and give back until cancelled. Nothing that the database does ends it."""
        await self._rounds.run()

    async def close(self) -> None:
        """Give back what is left, when `run` has ended and the ledger has copied what it can."""
        await self._rounds.close()

    # What a call needs, and what to do where it is not there.

    def _hold(
        self,
        operation_id: UUID,
        scopes: Mapping[ScopeKind, Sequence[str]],
        need: Need,
        waiting: Waiting[Hold] | None,
    ) -> Hold | None:
        """The hold; None where the database has to be asked first. Raises when it refuses."""
        now = time.monotonic()
        accounts = self._pool.matching.find(scopes)
        if accounts is None:
            return None
        parts = parts_of(self._pool, accounts, need, self._currency, now) if accounts else []
        short = [part for part in parts if part.short]
        if short:
            self._judge(short, waiting, now)
            return None
        hold = Hold(operation_id, self._replica, parts, now)
        for part in parts:
            account, pot, amount = part.account, part.pot, part.amount
            if pot.free < pot.low and 0 < amount <= pot.low and not account.refill:
                self._pool.refill(account)
                self._waiters.woken.set()
        return hold

    def _judge(self, short: list[Part], waiting: Waiting[Hold] | None, now: float) -> None:
        """Note what has to be asked for, or raise that it is not to be had."""
        refused = []
        for part in short:
            account, pot, amount = part.account, part.pot, part.amount
            seen = waiting is not None and pot.seen >= waiting.since
            barren = now < pot.barren_until
            hopeless = amount > EXACT.add(pot.reach, pot.others) and (seen or now - pot.seen < BARREN_SECONDS)
            if hopeless or (account.terms.fixed and amount > account.terms.limit_amount):
                refused.append(part)
            elif amount <= pot.reach:
                continue
            elif barren:
                refused.append(part)
            elif seen and waiting is not None and self._waited(waiting, part, now):
                pot.barren_until = now + BARREN_SECONDS
                refused.append(part)
        if refused:
            raise refusal(refused, now)
        self._pool.demand({part.account: part.amount for part in short})

    def _waited(self, waiting: Waiting[Hold], part: Part, now: float) -> bool:
        """Whether other replicas have had their time; meanwhile they are asked again and again, for what one of them
        gave back may have gone to another of them."""
        if waiting.deadline is None:
            waiting.deadline = now + ASK_SECONDS
        if now - part.pot.asked >= ASK_AGAIN_SECONDS:
            part.pot.asked = now
            self._rounds.ask(part.account)
        return now >= waiting.deadline

    async def _wait(self, attempt: Callable[[Waiting[T]], T | None]) -> T:
        future = self._waiters.add(attempt)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                found = future.result()
                if isinstance(found, Hold):
                    self.release(found)
            raise
