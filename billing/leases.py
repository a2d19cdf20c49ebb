"""Leases: what this replica may spend without asking anyone, of every budget and limit that applies to its calls.

A replica takes a slice out of a window, holds parts of it for calls, in memory, and gives back what is left when it is
idle, when another replica asks, and at the end. A call waits for the database only where the lease does not suffice;
then one background task asks for all calls that wait, at once. Where the window has no more either, other replicas are
asked to give back what they do not use, and the call is refused when that brought nothing.

The ledger moves what was charged from leased to settled (`billing.settlements`). The lease of a process that died stays
counted until the next process on its spool has copied what was spooled.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.allowances import CHANNEL, Scope, ScopeKind, Unit
from billing.holds import Hold, Part, Rate, other_currency, parts_of, refusal
from billing.lease_pool import EXACT, NOTHING, Account, Demand, Gift, Need, Pool
from billing.lease_store import Store
from billing.notices import Notices
from billing.records import refuse_bad_money
from billing.refusals import BudgetError, BudgetExhausted, LimitExceeded, OtherCurrencyError, UnpricedError

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
]

ASK_SECONDS = 0.3
"""How long other replicas have to give back what a call here needs."""
POLL_SECONDS = 0.03
"""While calls wait for that: how often the database is looked at, should a notice be missed."""
BARREN_SECONDS = 1.0
"""After that brought nothing, how long nobody is asked again; and how long it is believed that a window has no more."""
TICK_SECONDS = 0.5
ACTIVE_SECONDS = 2.0
RENEW_SECONDS = 10.0
TIDY_SECONDS = 60.0
CLOSE_SECONDS = 3.0
MOST_SCOPES = 100_000
"""More are not remembered to have no budget and no limit."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Left(NamedTuple):
    """The least that is left in a hard budget, and in a limit of tokens, of all that apply; None: there is none."""

    money: Decimal | None
    tokens: int | None


class _Waiting(Generic[T]):
    """A call that waits until `attempt` has an answer (None: not yet). What it raises is the answer too."""

    __slots__ = ("attempt", "deadline", "future", "since")

    def __init__(self, attempt: "Callable[[_Waiting[T]], T | None]") -> None:
        self.attempt = attempt
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.since = time.monotonic()
        self.deadline: float | None = None
        """Until then other replicas are waited for; None: nobody was asked."""


class Leases:
    """Admits calls against budgets and limits, for one gateway process.

    `replica` is the process's `Spool.replica`. `currency` is what calls are charged in. Make it before `notices` run;
    `run` must be running.
    """

    def __init__(self, engine: AsyncEngine, replica: str, currency: str, notices: Notices) -> None:
        self._store = Store(engine, replica)
        self._pool = Pool()
        self._replica = replica
        self._currency = currency
        self._notices = notices
        self._waiting: list[_Waiting[Any]] = []
        self._wake = asyncio.Event()
        self._learning: set[Scope] = set()
        self._asks: set[UUID] = set()
        self._renew_at = self._tidy_at = self._tick_at = 0.0
        self._failing = False
        notices.subscribe(CHANNEL, self._noticed)

    async def admit(self, operation_id: UUID, scopes: Mapping[ScopeKind, Sequence[str]], need: Need) -> Hold:
        """`admit_at_hand`, and where that has no answer `admit_waiting`."""
        hold = self.admit_at_hand(operation_id, scopes, need)
        return hold if hold is not None else await self.admit_waiting(operation_id, scopes, need)

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
        accounts = self._pool.find(scopes)
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
        if self._waiting:
            self._wake.set()

    def release(self, hold: Hold) -> None:
        """No row will be recorded: all that it held is free again."""
        hold.release()
        if self._waiting:
            self._wake.set()

    async def run(self) -> NoReturn:
        """Learn, lease, and give back until cancelled. Nothing that the database does ends it."""
        try:
            while True:
                try:
                    await self._round()
                    await self._keep_house()
                except Exception as error:  # whatever it is, it is for those who wait, and the next round may be better
                    self._fail(error)
                else:
                    self._failing = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS if self._waiting else TICK_SECONDS):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            for waiting in self._waiting:
                waiting.future.cancel()

    async def close(self) -> None:
        """Give back what is left, when `run` has ended and the ledger has copied what it can. What cannot be given back
        stays counted until the next process on this spool."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._correct()
                pots = [pot for account in self._pool.accounts.values() for pot in account.pots.values()]
                if gifts := self._pool.gifts(time.monotonic(), all_of_it=True):
                    await self._store.give(gifts)
                await self._store.tidy(pots)
        except Exception as error:
            log.warning("leases not given back; the next start on this spool does it", reason=repr(error))

    # What a call needs, and what to do where it is not there.

    def _hold(
        self,
        operation_id: UUID,
        scopes: Mapping[ScopeKind, Sequence[str]],
        need: Need,
        waiting: _Waiting[Hold] | None,
    ) -> Hold | None:
        """The hold; None where the database has to be asked first. Raises when it refuses."""
        now = time.monotonic()
        accounts = self._pool.find(scopes)
        if accounts is None:
            return None
        parts = parts_of(self._pool, accounts, need, self._currency, now) if accounts else []
        short = [part for part in parts if part.short]
        if short:
            self._judge(short, waiting, now)
            return None
        hold = Hold(operation_id, self._replica, parts, now)
        for account, pot, amount in parts:
            if pot.free < pot.low and 0 < amount <= pot.low and not account.refill:
                self._pool.refill(account)
                self._wake.set()
        return hold

    def _judge(self, short: list[Part], waiting: _Waiting[Hold] | None, now: float) -> None:
        """Note what has to be asked for, or raise that it is not to be had."""
        refused = []
        for part in short:
            account, pot, amount = part
            seen = waiting is not None and pot.seen >= waiting.since
            barren = now < pot.barren_until
            hopeless = amount > EXACT.add(pot.reach, pot.others) and (seen or now - pot.seen < BARREN_SECONDS)
            if amount > account.terms.limit_amount or hopeless:
                refused.append(part)
            elif amount <= pot.reach or not (seen or barren):
                self._pool.demand(account, amount)
            elif barren or (waiting is not None and self._waited(waiting, account, now)):
                if not barren:
                    pot.barren_until = now + BARREN_SECONDS
                refused.append(part)
            else:
                self._pool.demand(account, amount)
        if refused:
            raise refusal(refused, now)

    def _waited(self, waiting: _Waiting[Hold], account: Account, now: float) -> bool:
        """Whether other replicas have had their time; they are asked when it begins."""
        if waiting.deadline is None:
            waiting.deadline = now + ASK_SECONDS
            self._asks.add(account.terms.id)
        return now >= waiting.deadline

    async def _wait(self, attempt: Callable[[_Waiting[T]], T | None]) -> T:
        waiting = _Waiting(attempt)
        self._waiting.append(waiting)
        self._wake.set()
        try:
            return await waiting.future
        except asyncio.CancelledError:
            if waiting.future.done() and not waiting.future.cancelled() and waiting.future.exception() is None:
                found = waiting.future.result()
                if isinstance(found, Hold):
                    self.release(found)
            raise

    def _serve(self) -> None:
        """Try for everybody who waits, in the order that they came."""
        for waiting in self._waiting:
            if waiting.future.done():
                continue
            try:
                found = waiting.attempt(waiting)
            except Exception as error:
                waiting.future.set_exception(error)
            else:
                if found is not None:
                    waiting.future.set_result(found)
        self._waiting = [waiting for waiting in self._waiting if not waiting.future.done()]

    # What one task does in the background, one thing after the other: nobody else speaks to the database for this.

    async def _round(self) -> None:
        await self._correct()
        if self._pool.unknown:
            await self._learn()
        self._pool.forget_demands()
        self._serve()
        if gifts := self._pool.gifts(time.monotonic()):
            await self._give(gifts)
        if demands := self._pool.demands(time.monotonic()):
            await self._take(demands)
            self._serve()
        if self._asks:
            asks, self._asks = self._asks, set()
            await self._store.ask(asks)
        if self._pool.unknown or any(waiting.deadline is None for waiting in self._waiting):
            self._wake.set()

    async def _correct(self) -> None:
        if doubtful := [account.terms.id for account in self._pool.doubtful]:
            self._pool.correct(await self._store.granted(doubtful))

    async def _learn(self) -> None:
        asked, self._pool.unknown = self._pool.unknown, set()
        self._learning = asked
        try:
            moment, now, found = await self._store.find(list(asked))
        except BaseException:
            self._pool.unknown |= asked
            raise
        finally:
            self._learning = set()
        self._pool.set_clock(moment, now)
        if len(self._pool.scopes) > MOST_SCOPES:
            self._pool.forget_absent()
        self._pool.learn(asked, found)

    async def _take(self, demands: Sequence[Demand]) -> None:
        asked = time.monotonic()
        accounts = [self._pool.accounts[demand.terms.id] for demand in demands]
        try:
            moment, now, answers = await self._store.take(demands)
        except BaseException:
            self._pool.doubt(accounts)
            raise
        self._pool.set_clock(moment, now)
        self._pool.take(answers, asked)
        answered = {answer.key[0] for answer in answers}
        for account in accounts:
            if account.terms.id not in answered:  # it is gone
                account.refill = False
                self._pool.unknown.add((account.terms.scope_kind, account.terms.scope_id))

    async def _give(self, gifts: Sequence[Gift]) -> None:
        try:
            await self._store.give(gifts)
        except BaseException:
            self._pool.doubt(self._pool.accounts[gift.key[0]] for gift in gifts if gift.key[0] in self._pool.accounts)
            raise

    async def _keep_house(self) -> None:
        now = time.monotonic()
        if now < self._tick_at:
            return
        self._tick_at = now + TICK_SECONDS
        if not self._notices.healthy:
            self._pool.unknown |= self._pool.scopes.keys()
        self._pool.idle(now)
        if self._pool.unknown or self._pool.wanted:
            self._wake.set()
        if active := self._pool.active(now, ACTIVE_SECONDS):
            for key, (left, others) in (await self._store.look(active)).items():
                active[key].look(left, others, now)
        if now >= self._renew_at:
            self._renew_at = now + RENEW_SECONDS
            self._pool.doubt(self._pool.not_renewed(await self._store.renew()))
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_SECONDS
            self._pool.drop(await self._store.tidy(self._pool.finished(now)))

    def _fail(self, error: Exception) -> None:
        if not self._failing:
            log.warning("leases: the database cannot be asked", error=repr(error), waiting=len(self._waiting))
        self._failing = True
        for waiting in self._waiting:
            if not waiting.future.done():
                waiting.future.set_exception(error)
        self._waiting = []

    def _noticed(self, payload: str | None) -> None:
        """`set KIND ID`, `want REPLICA BUDGET`, `gave REPLICA BUDGET`; None: any of them may have been missed."""
        word, _, rest = (payload or "").partition(" ")
        who, _, what = rest.partition(" ")
        if word == "set":
            scope = (who, what)
            if scope in self._pool.scopes or scope in self._learning:
                self._pool.unknown.add(scope)
        elif payload is None:
            self._pool.unknown |= self._pool.scopes.keys() | self._learning
        elif who != self._replica and (account := self._pool.accounts.get(UUID(what))) is not None:
            if word == "want":
                self._pool.wanted.add(account)
            else:
                account.hope()
        self._wake.set()
