"""Whether what was spent in an hour is a spike, by a rule: far above the usual, and by an amount that matters."""

from typing import Literal

from billing.alerts.detector import Baseline, score
from billing.alerts.kinds import Spike

State = Literal["firing", "holding", "clear"]
"""`holding`: not enough to open an alert, but enough to keep one open."""

HOLD = 0.6
"""Of the score (and of the minimum) that opens an alert, what keeps it open."""


def stands_out(rule: Spike, minimum: float, usual: Baseline, amount: float) -> State:
    """How `amount`, spent in sixty minutes, compares with `usual`. `minimum`: least excess, in units of `amount`."""
    excess, height = amount - usual.expected, score(usual, amount)
    if height >= rule.score and excess >= minimum:
        return "firing"
    return "holding" if height >= HOLD * rule.score and excess >= HOLD * minimum else "clear"
