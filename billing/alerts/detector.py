"""How far the spend of an hour is from what the same hour usually has: a robust z-score, on arrays alone.

The logarithm of spend is compared, so that a scope's noise, which grows with its spend, has one spread by night and by
day. Centre and spread are medians (median and MAD, Rousseeuw and Croux 1993), so that past spikes do not hide new ones.
The spread is that of predictions: what each past hour was against the median of the others. An hour is compared with
the same hour of the day, of the week, or of the week with its neighbours, whichever has predicted best so far.
Figures here are floats: they say how unusual an amount is, and are never charged.
"""

from math import exp, log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HOURS_A_DAY = 24
HOURS_A_WEEK = 168
LONGEST_HISTORY_WEEKS = 8

LEAST_SCALE = 0.18
"""Of the logarithm: however steady the past was, 18% up or down is nothing unusual."""

_OFFSET = 0.1
"""Of the median hour, added before the logarithm: hours of next to nothing would else look as far apart as any."""

_NEAR_HOURS = 2
"""Of the day, on either side: nights may be less regular than days."""

_MAD_TO_DEVIATION = 1.4826

Series = NDArray[np.float64]


class Baseline(NamedTuple):
    """What an hour usually has."""

    expected: float
    """In the units of the history."""
    scale: float
    """Standard deviation of the logarithm of (amount + offset)."""
    offset: float


def baseline(history: Series, warm_up_hours: int = 2 * HOURS_A_WEEK) -> Baseline | None:
    """What the hour after `history` should have.

    `history`: amounts of whole hours, one after the other without gaps, oldest first. None while there are fewer than
    `warm_up_hours` (at least two days) since the first hour with anything.
    """
    begun = np.flatnonzero(history)
    if not begun.size or history.size - begun[0] < max(warm_up_hours, 2 * HOURS_A_DAY):
        return None
    known = history[begun[0] :][-LONGEST_HISTORY_WEEKS * HOURS_A_WEEK :]
    offset = _OFFSET * float(np.median(known[known > 0]))
    logs = np.log(known + offset)
    ways = ((HOURS_A_DAY, False), (HOURS_A_WEEK, False), (HOURS_A_WEEK, True))
    guesses = [_guess(logs, period, smoothed) for period, smoothed in ways if known.size >= 2 * period]
    centre, spread = min(guesses, key=lambda guess: guess[1])
    return Baseline(max(exp(centre) - offset, 0.0), max(spread, LEAST_SCALE), offset)


def between(last: Baseline, running: Baseline, share: float) -> Baseline:
    """Of sixty minutes that end when `share` (0 to 1) of the running hour has passed."""
    mixed = (a + (b - a) * share for a, b in zip(last, running, strict=True))
    return Baseline(*mixed)


def score(usual: Baseline, amount: float) -> float:
    """How many deviations `amount`, of sixty minutes, is above what is usual."""
    return (log(amount + usual.offset) - log(usual.expected + usual.offset)) / usual.scale


def _guess(logs: Series, period: int, smoothed: bool) -> tuple[float, float]:
    """Centre and spread of the next one, by those a whole number of periods before it (two at least)."""
    turns = logs.size // period
    table = logs[logs.size - turns * period :].reshape(turns, period)  # its first column is the hour asked for
    others, usual = _median_of_others(table), np.median(table, axis=0, keepdims=True)
    if smoothed:
        others, usual = _smooth(others), _smooth(usual)
    residuals = table - others
    # Spend that grows or shrinks: how the last week stands to what it should have been.
    level = float(np.median(residuals.ravel()[-HOURS_A_WEEK:]))
    hour_of_day = np.arange(period) % HOURS_A_DAY
    near = residuals[:, (hour_of_day <= _NEAR_HOURS) | (hour_of_day >= HOURS_A_DAY - _NEAR_HOURS)]
    # The next one is held against all of them, each of these was against one less.
    spread = max(_deviation(near), _deviation(residuals))
    spread *= sqrt((1 + _variance_of_median(turns)) / (1 + _variance_of_median(turns - 1)))
    return float(usual[0, 0]) + level, spread


def _smooth(table: Series) -> Series:
    """Each hour with half of what its neighbours say: few weeks make a rough profile."""
    smooth: Series = 0.5 * table + 0.25 * (np.roll(table, 1, axis=1) + np.roll(table, -1, axis=1))
    return smooth


def _deviation(residuals: Series) -> float:
    return _MAD_TO_DEVIATION * float(np.median(np.abs(residuals - np.median(residuals))))


def _variance_of_median(count: int) -> float:
    """Of so many, over the variance of one: that of a mean for one or two, nearly pi / 2 times as much for more."""
    return (1 if count <= 2 else 1.57) / count


def _median_of_others(table: Series) -> Series:
    """For each row of each column, the median of the column without it."""
    rows = table.shape[0]
    order = np.argsort(table, axis=0)
    rank = np.argsort(order, axis=0)
    ordered = np.take_along_axis(table, order, axis=0)

    def left(index: int) -> Series:
        found: Series = np.where(rank <= index, ordered[index + 1], ordered[index])
        return found

    median: Series = (left((rows - 2) // 2) + left((rows - 1) // 2)) / 2
    return median
