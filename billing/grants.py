"""How much is taken out of windows at once, for calls that wait and for those to come. Arithmetic alone."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple
from uuid import UUID

from billing.allowances import Allowance
from billing.pots import EXACT, NOTHING

Wish = Mapping[UUID, Decimal]
"""What a call that waits holds of each allowance whose lease does not have it."""


class Demand(NamedTuple):
    """What the database is asked for."""

    terms: Allowance
    free: Decimal
    """What the pot has: it is filled up to a slice."""


class Rest(NamedTuple):
    """What nobody has taken out of a window, and the part of it that a lease is filled up to."""

    rest: Decimal
    slice: Decimal


def grants(demands: Iterable[Demand], wishes: Sequence[Wish], rests: Mapping[UUID, Rest]) -> dict[UUID, Decimal]:
    """How much of each window to take: for each call, first come first served, all that it lacks or nothing; and a
    slice for calls to come.

    A part of what a call lacks would be of no use to it, and might be what a call on another replica waits for. So a
    window that holds less than a call needs is left whole too, unless a slice of it is more than that.
    """
    free = {demand.terms.id: demand.free for demand in demands}
    needs: dict[UUID, Decimal] = dict.fromkeys(rests, NOTHING)
    unmet: dict[UUID, Decimal] = dict.fromkeys(rests, NOTHING)
    for wish in wishes:
        if not wish.keys() <= rests.keys():
            continue
        sums = {key: EXACT.add(needs[key], amount) for key, amount in wish.items()}
        if all(amount <= EXACT.add(free[key], rests[key].rest) for key, amount in sums.items()):
            needs |= sums
        else:
            unmet |= {key: max(unmet[key], amount) for key, amount in wish.items()}
    taken = {}
    for key, (rest, slice_) in rests.items():
        missing = EXACT.subtract(needs[key], free[key]) if needs[key] else NOTHING
        if slice_ >= unmet[key]:
            missing = max(missing, EXACT.subtract(slice_, free[key]))
        taken[key] = max(min(rest, missing), NOTHING)
    return taken
