"""What this replica has leased, of all allowances, and what it has to ask the database for or give back.

`now` is seconds of a monotonic clock everywhere: a wall clock that jumps moves no window.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from math import inf
from typing import NamedTuple
from uuid import UUID

from billing.allowances import Allowance, Scope
from billing.grants import Demand, Wish
from billing.matching import Matching
from billing.pots import EXACT, NOTHING, Account, Key, Pot
from billing.windows import window_bounds, zone


class Taken(NamedTuple):
    """What the database answers to a Demand."""

    key: Key
    ends_at: datetime | None
    taken: Decimal
    granted: Decimal
    left: Decimal
    others: Decimal


class Gift(NamedTuple):
    """What goes back into a window."""

    key: Key
    amount: Decimal


class Pool:
    """All that one replica knows and has."""

    def __init__(self) -> None:
        self.matching = Matching()
        self.accounts: dict[UUID, Account] = {}
        self.hungry: set[Account] = set()
        self.wishes: list[Wish] = []
        """Of the calls that wait, in the order that they came."""
        self.wanted: set[Account] = set()
        self.doubtful: set[Account] = set()
        """Nobody knows what became of the last statement about their lease."""
        self._clock: tuple[datetime, float] | None = None

    def set_clock(self, moment: datetime, now: float) -> None:
        """The database's time was `moment` at `now`."""
        self._clock = (moment, now)

    def learn(self, asked: Iterable[Scope], found: Iterable[Allowance]) -> None:
        """These are all allowances of the scopes asked for."""
        by_scope: dict[Scope, list[Account]] = {scope: [] for scope in asked}
        for terms in found:
            account = self.accounts.get(terms.id)
            if account is None:
                account = self.accounts[terms.id] = Account(terms)
            elif account.terms != terms:
                self._change(account, terms)
            by_scope[terms.scope_kind, terms.scope_id].append(account)
        for scope, accounts in by_scope.items():
            for account in self.matching.of(scope):
                if account not in accounts:
                    self._forget(account)
            self.matching.file(scope, accounts)

    def _change(self, account: Account, terms: Allowance) -> None:
        """Give all back and ask anew: the limit may be lower, and the window another."""
        if account.terms.time_zone != terms.time_zone:
            account.pot = None
        account.terms = terms
        self.wanted.add(account)
        account.hope()
        for pot in account.pots.values():
            pot.seen = -inf

    def _forget(self, account: Account) -> None:
        """Its leases went with the row. Holds that are open settle into nothing."""
        account.gone = True
        del self.accounts[account.terms.id]
        for accounts in (self.hungry, self.wanted, self.doubtful):
            accounts.discard(account)

    def pot(self, account: Account, now: float) -> Pot:
        """The pot of the window of now."""
        pot = account.pot
        if pot is not None and now < pot.ends:
            return pot
        if pot is not None and account.terms.prepaid:  # some of its credit has expired
            self.wanted.add(account)
            pot.seen = -inf
        assert self._clock is not None, "an allowance is learnt together with the time"
        moment = self._clock[0] + timedelta(seconds=now - self._clock[1])
        terms = account.terms
        starts_at, ends_at = window_bounds(moment, terms.window, zone(terms.time_zone))
        return self._turn(account, starts_at, ends_at, inf if ends_at is None else now + _seconds(moment, ends_at))

    def _turn(self, account: Account, starts_at: datetime, ends_at: datetime | None, ends: float) -> Pot:
        pot = account.pots.get(starts_at)
        if pot is None:
            pot = account.pots[starts_at] = Pot((account.terms.id, starts_at))
        pot.ends_at, pot.ends = ends_at, ends
        account.pot = pot
        return pot

    def demand(self, amounts: Mapping[Account, Decimal]) -> None:
        """A call waits for so much, all of it."""
        self.wishes.append({account.terms.id: amount for account, amount in amounts.items()})
        self.hungry.update(amounts)

    def refill(self, account: Account) -> None:
        """Ask for more, or for a first look at the window, with no call waiting."""
        account.refill = True
        self.hungry.add(account)

    def forget_demands(self) -> None:
        self.wishes = []
        self.hungry = {account for account in self.hungry if account.refill}

    def demands(self, now: float) -> list[Demand]:
        """What to ask the database for."""
        return [Demand(account.terms, self.pot(account, now).free) for account in self.hungry]

    def take(self, answers: Iterable[Taken], now: float) -> None:
        """The database has answered; it alone decides which window it is. `now` is from before it was asked."""
        assert self._clock is not None
        for answer in answers:
            account = self.accounts.get(answer.key[0])
            if account is None:
                continue
            ends_at = answer.ends_at
            ends = inf if ends_at is None else self._clock[1] + _seconds(self._clock[0], ends_at)
            pot = self._turn(account, answer.key[1], ends_at, ends)
            pot.add(answer.taken)
            pot.granted = answer.granted
            pot.look(answer.left, answer.others, now)
            account.refill = False

    def doubt(self, accounts: Iterable[Account]) -> None:
        self.doubtful.update(account for account in accounts if not account.gone)

    def doubt_all(self) -> None:
        """This replica was taken for dead, and its leases were given away."""
        self.doubt(account for account in self.accounts.values() if any(pot.granted for pot in account.pots.values()))

    def correct(self, granted: Mapping[Key, Decimal]) -> None:
        """The doubtful accounts have these leases: the difference to what was thought is free, or is not there."""
        for budget_id, starts_at in granted:
            account = self.accounts.get(budget_id)
            if account is not None and starts_at not in account.pots and account.terms.window != "minute":
                account.pots[starts_at] = Pot((budget_id, starts_at))
        for account in self.doubtful:
            for pot in account.pots.values():
                amount = granted.get(pot.key, NOTHING)
                pot.add(EXACT.subtract(amount, pot.granted))
                pot.granted = amount
        self.doubtful.clear()

    def gifts(self, now: float, all_of_it: bool = False) -> list[Gift]:
        """Take out of the pots what is free and wanted back, or all that is free.

        Whoever gets them must give them, or `doubt` the accounts.
        """
        gifts: list[Gift] = []
        for account in list(self.accounts.values()) if all_of_it else self.wanted:
            gifts += self._give(account, now, all_of_it)
        self.wanted.clear()
        return gifts

    def idle(self, now: float) -> None:
        """Want back what nobody uses, and what is left of windows that are over."""
        for account in self.accounts.values():
            over = any(_is_left_over(account, pot, now) for pot in account.pots.values())
            if over or (account.pot is not None and account.pot.idle(now)):
                self.wanted.add(account)

    def _give(self, account: Account, now: float, all_of_it: bool) -> list[Gift]:
        gifts = []
        for starts_at, pot in list(account.pots.items()):
            over = now >= pot.ends or pot is not account.pot
            if over and account.terms.window == "minute":  # a minute's lease goes with its minute
                del account.pots[starts_at]
            elif pot.free > 0:
                gifts.append(Gift(pot.key, pot.free))
                pot.granted = EXACT.subtract(pot.granted, pot.free)
                pot.left = EXACT.add(pot.left, pot.free)
                pot.free = NOTHING
            if starts_at not in account.pots and account.pot is pot:
                account.pot = None
        return gifts

    def active(self, now: float, seconds: float) -> dict[Key, Pot]:
        """Pots of hard allowances that calls used in the last seconds."""
        pots = (account.pot for account in self.accounts.values() if account.terms.hard)
        return {pot.key: pot for pot in pots if pot is not None and now - pot.used < seconds and now < pot.ends}

    def finished(self, now: float) -> list[Pot]:
        """Pots of windows that are over, with nothing left to do. They stay until their row is gone (`drop`), so that
        what a row has that no pot knows of is free."""
        return [
            pot
            for account in self.accounts.values()
            for pot in account.pots.values()
            if now >= pot.ends and not pot.open and not pot.free
        ]

    def drop(self, pots: Iterable[Pot]) -> None:
        for pot in pots:
            account = self.accounts.get(pot.key[0])
            if account is not None and account.pots.pop(pot.key[1], None) is account.pot:
                account.pot = None


def _is_left_over(account: Account, pot: Pot, now: float) -> bool:
    """Whether there is something to give back of a window that is over; until calls settle there may be nothing, and
    what the account has of the window of now is not to be given back for it again and again."""
    over = pot is not account.pot or now >= pot.ends
    return over and (pot.free > 0 or account.terms.window == "minute")


def _seconds(start: datetime, end: datetime) -> float:
    return (end - start).total_seconds()
