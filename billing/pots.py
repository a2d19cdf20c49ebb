"""Pots: what this replica has of one window of one allowance. Arithmetic in memory, no clock, no database.

What a pot has been granted is either free, held by an open call, or spent: `granted == free + held + spent`. Only what
is free can be held, so holds never exceed the lease; and the database counts the whole lease until the ledger has
charged it (`billing.settlements`).
"""

from datetime import datetime
from decimal import Context, Decimal, Inexact, InvalidOperation, Overflow
from math import inf
from uuid import UUID

from billing.allowances import Allowance

EXACT = Context(prec=1000, traps=[Inexact, InvalidOperation, Overflow])
SUM = Context(prec=200_000, traps=[Inexact, InvalidOperation, Overflow])
"""Exact for whatever two numbers PostgreSQL can hold."""
NOTHING, ONE = Decimal(0), Decimal(1)
LOW = Decimal("0.03125")
"""A pot with less than this share of what is left for all asks for more in the background: half a slice."""

IDLE_SECONDS = 30.0
"""A pot that no call has used for so long gives its lease back."""

Key = tuple[UUID, datetime]


class Pot:
    """One window of one allowance."""

    __slots__ = (
        "asked",
        "barren_until",
        "ends",
        "ends_at",
        "free",
        "granted",
        "key",
        "left",
        "low",
        "open",
        "others",
        "seen",
        "used",
    )

    def __init__(self, key: Key) -> None:
        self.key = key
        self.ends = inf
        self.ends_at: datetime | None = None
        self.granted = NOTHING
        """As the database has it for this replica."""
        self.free = NOTHING
        """Below 0 when calls used more tokens than they held."""
        self.open = 0
        """Holds."""
        self.left = NOTHING
        """What nobody had taken out of the window when the database was last asked, at `seen`."""
        self.low = NOTHING
        """With less than this free, more is asked for in the background."""
        self.others = NOTHING
        """What other replicas had out then."""
        self.seen = -inf
        self.used = -inf
        self.asked = -inf
        """When other replicas were asked to give back what they do not use."""
        self.barren_until = -inf
        """Until then nobody is asked again for what could not be had."""

    @property
    def reach(self) -> Decimal:
        """The most that this replica can hold now, as far as it knows."""
        return EXACT.add(self.free, self.left)

    def add(self, amount: Decimal) -> None:
        self.free = EXACT.add(self.free, amount)

    def idle(self, now: float) -> bool:
        """Whether there is something free that nobody uses."""
        return self.free > 0 and now - max(self.used, self.seen) > IDLE_SECONDS

    def look(self, left: Decimal, others: Decimal, now: float) -> None:
        """The database said so at `now`."""
        self.left, self.others, self.seen = max(left, NOTHING), others, now
        self.low = EXACT.multiply(self.left, LOW)


class Account:
    """An allowance as this replica knows it, with the pots of its windows."""

    __slots__ = ("gone", "pot", "pots", "refill", "terms", "unit")

    def __init__(self, terms: Allowance) -> None:
        self.pots: dict[datetime, Pot] = {}
        self.pot: Pot | None = None
        """Of the window of now, once it is known."""
        self.unit = terms.unit
        self.refill = False
        self.gone = False
        self.terms = terms

    def hope(self) -> None:
        """There may be something to be had again."""
        for pot in self.pots.values():
            pot.barren_until = -inf
