"""Which of several upstreams a request goes to: pure functions of what is known of each."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Balance = Literal["weighted", "least_busy", "latency", "prefix_affine"]

EXPLORED = 0.05
"""So large a part of the requests is shared out by weight under `latency`: what was slow once is measured again."""
SPARE = 8.0
FACTOR = 1.5
"""Overloaded is who has more than FACTOR times and SPARE requests more in flight than the least busy one."""


class View(NamedTuple):
    """One upstream that could take the request."""

    weight: int = 1
    in_flight: int = 0
    seconds: float | None = None
    """What it takes to the first byte, on average; None before it was measured."""
    matched: int = 0
    """How much of the prompt it holds already, in any unit that is the same for all."""

    @property
    def busy(self) -> float:
        return self.in_flight / self.weight


def weighted(views: Sequence[View], roll: float) -> int:
    """Each by its share of the weights, whatever it is doing."""
    left = roll * sum(view.weight for view in views)
    for index, view in enumerate(views):
        left -= view.weight
        if left < 0:
            return index
    return len(views) - 1


def least_busy(views: Sequence[View], roll: float) -> int:
    """The fewest requests in flight by weight; equals by the roll."""
    return _least(views, [view.busy for view in views], roll)


def latency(views: Sequence[View], roll: float) -> int:
    """The shortest expected wait: its average time, for each request in flight and this one; unmeasured ones first."""
    if roll < EXPLORED:
        return weighted(views, roll / EXPLORED)
    waits = [0.0 if view.seconds is None else view.seconds * (view.in_flight + 1) / view.weight for view in views]
    return _least(views, waits, (roll - EXPLORED) / (1 - EXPLORED))


def prefix_affine(views: Sequence[View], roll: float) -> int:
    """Who holds the longest prefix and is not overloaded; equals, and prompts that nobody knows, by `least_busy`."""
    least = min(view.busy for view in views)
    usable = [i for i, view in enumerate(views) if not _overloaded(view.busy, least)]
    longest = max(views[i].matched for i in usable)
    best = [i for i in usable if views[i].matched == longest]
    return best[least_busy([views[i] for i in best], roll)]


POLICIES: dict[Balance, Callable[[Sequence[View], float], int]] = {
    "weighted": weighted,
    "least_busy": least_busy,
    "latency": latency,
    "prefix_affine": prefix_affine,
}
"""Each takes the candidates, at least one, and a number in [0, 1), and returns the index of its choice."""


def _overloaded(busy: float, least: float) -> bool:
    return busy > FACTOR * least and busy > least + SPARE


def _least(views: Sequence[View], values: Sequence[float], roll: float) -> int:
    lowest = min(values)
    equal = [i for i, value in enumerate(values) if value == lowest]
    return equal[weighted([views[i] for i in equal], roll)]
