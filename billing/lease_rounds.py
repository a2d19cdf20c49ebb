"""What one task does in the background, one thing after the other: learn what applies to whom, lease, give back.

Nobody else speaks to the database for this, so what this replica has there is known.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import NoReturn
from uuid import UUID

import structlog

from billing.allowances import CHANNEL, Scope
from billing.grants import Demand
from billing.lease_pool import Gift, Pool
from billing.lease_store import Store, TakenForDeadError
from billing.notices import Notices
from billing.pots import Account
from billing.waiting import Waiters

POLL_SECONDS = 0.03
"""While calls wait for other replicas: how often the database is looked at, should a notice be missed."""
TICK_SECONDS = 0.5
ACTIVE_SECONDS = 2.0
RENEW_SECONDS = 10.0
LOST_SECONDS = 30.0
"""Calls at once of a replica that has not been heard of for so long are no longer counted."""
TIDY_SECONDS = 60.0
CLOSE_SECONDS = 3.0
MOST_SCOPES = 100_000
"""More are not remembered to have no budget and no limit."""

log = structlog.get_logger(__name__)


class Rounds:
    """`run` must be running for anything to come out of the database."""

    def __init__(self, store: Store, pool: Pool, notices: Notices, waiters: Waiters, replica: str) -> None:
        self._store = store
        self._pool = pool
        self._notices = notices
        self._waiters = waiters
        self._replica = replica
        self._learning: set[Scope] = set()
        self._asks: set[UUID] = set()
        self._renew_at = self._tidy_at = self._tick_at = 0.0
        self._renewed = self._renewing_since = float("-inf")
        self._failing = False
        notices.subscribe(CHANNEL, self._noticed)

    def ask(self, account: Account) -> None:
        """Have other replicas give back what they do not use of this."""
        self._asks.add(account.terms.id)

    async def run(self) -> NoReturn:
        """Until cancelled. Nothing that the database does ends it."""
        try:
            while True:
                try:
                    await self._renew()
                    await self._round()
                    await self._keep_house()
                except TakenForDeadError:
                    self._renew_at = 0.0
                    self._waiters.woken.set()
                except Exception as error:  # whatever it is, it is for those who wait, and the next round may be better
                    self._fail(error)
                else:
                    self._failing = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS if self._waiters else TICK_SECONDS):
                        await self._waiters.woken.wait()
                self._waiters.woken.clear()
        finally:
            self._waiters.cancel()

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

    async def _renew(self) -> None:
        """Say that this replica lives, before it leases anything; and look who has not said so.

        Nobody can say so while the database is away: only who has done it all the time for so long calls others lost.
        """
        now = time.monotonic()
        if now < self._renew_at:
            return
        if await self._store.renew():
            log.warning("this replica was taken for dead; what it had leased is not its own any more")
            self._pool.doubt_all()
        if now - self._renewed > 2 * RENEW_SECONDS:
            self._renewing_since = now
        self._renewed, self._renew_at = now, now + RENEW_SECONDS
        if now - self._renewing_since >= LOST_SECONDS:
            await self._store.free_lost(LOST_SECONDS)

    async def _round(self) -> None:
        await self._correct()
        pool, waiters = self._pool, self._waiters
        if pool.matching.unknown:
            await self._learn()
        pool.forget_demands()
        waiters.serve()
        if gifts := pool.gifts(time.monotonic()):
            await self._give(gifts)
        if demands := pool.demands(time.monotonic()):
            await self._take(demands)
            waiters.serve()
        if self._asks:
            asks, self._asks = self._asks, set()
            await self._store.ask(asks)
        if pool.matching.unknown or waiters.hurried:
            waiters.woken.set()

    async def _correct(self) -> None:
        if doubtful := [account.terms.id for account in self._pool.doubtful]:
            self._pool.correct(await self._store.granted(doubtful))

    async def _learn(self) -> None:
        matching = self._pool.matching
        asked, matching.unknown = matching.unknown, set()
        self._learning = asked
        try:
            moment, now, found = await self._store.find(list(asked))
        except BaseException:
            matching.unknown |= asked
            raise
        finally:
            self._learning = set()
        self._pool.set_clock(moment, now)
        if len(matching.scopes) > MOST_SCOPES:
            matching.forget_absent()
        self._pool.learn(asked, found)

    async def _take(self, demands: Sequence[Demand]) -> None:
        asked = time.monotonic()
        accounts = [self._pool.accounts[demand.terms.id] for demand in demands]
        try:
            moment, now, answers = await self._store.take(demands, self._pool.wishes)
        except BaseException:
            self._pool.doubt(accounts)
            raise
        self._pool.set_clock(moment, now)
        self._pool.take(answers, asked)
        answered = {answer.key[0] for answer in answers}
        for account in accounts:
            if account.terms.id not in answered:  # it is gone, or not what it was
                account.refill = False
                self._pool.matching.unknown.add((account.terms.scope_kind, account.terms.scope_id))

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
        pool = self._pool
        if not self._notices.healthy:
            pool.matching.unknown |= pool.matching.scopes.keys()
        pool.idle(now)
        if pool.matching.unknown or pool.wanted:
            self._waiters.woken.set()
        if active := pool.active(now, ACTIVE_SECONDS):
            for key, (left, others) in (await self._store.look(active)).items():
                active[key].look(left, others, now)
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_SECONDS
            pool.drop(await self._store.tidy(pool.finished(now)))

    def _fail(self, error: Exception) -> None:
        if not self._failing:
            log.warning("leases: the database cannot be asked", error=repr(error), waiting=len(self._waiters))
        self._failing = True
        self._waiters.fail(error)

    def _noticed(self, payload: str | None) -> None:
        """`set KIND ID`, `want REPLICA BUDGET`, `gave REPLICA BUDGET`; None: any of them may have been missed."""
        word, _, rest = (payload or "").partition(" ")
        who, _, what = rest.partition(" ")
        matching = self._pool.matching
        if word == "set":
            scope = (who, what)
            if scope in matching.scopes or scope in self._learning:
                matching.unknown.add(scope)
        elif payload is None:
            matching.unknown |= matching.scopes.keys() | self._learning
        elif who != self._replica and (account := self._pool.accounts.get(UUID(what))) is not None:
            if word == "want":
                self._pool.wanted.add(account)
            else:
                account.hope()
        self._waiters.woken.set()
