"""Are spikes of spend found, how soon, and how often is an alarm false: `python -m benchmarks.alerts --json FILE`.

Twelve weeks of traffic for each scope are made from the Azure LLM inference traces of 2023 (one hour of two services):

- each request has the tokens of a request drawn at random from the trace, at $3 a million in and $15 out;
- requests come in five-minute slots: their number is Poisson around the mean rate of the scope x how busy five minutes
  drawn from the trace are x the hour of the day (a cosine, 4 times as busy at 14:00 as at 02:00) x the weekend (0.4) x
  growth (3% a week) x noise of the hour (log-normal, sigma 0.15, correlated 0.5 from hour to hour).

The detector looks every five minutes, as an alert rule does every minute, at the sixty minutes before. The first two
weeks are warm-up. False alarms are counted on the traffic as it is, each alert once from its opening until it
has resolved. Then spikes go in one at a time: three times the traffic for two hours from a random five minutes on, and
is found when an alert opens within an hour that was not open before.
"""

import argparse
import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Report, Row
from billing.alerts.detector import HOURS_A_WEEK, LONGEST_HISTORY_WEEKS, Baseline, baseline, between
from billing.alerts.kinds import Spike
from billing.alerts.spikes import stands_out

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
SERVICES = ("code", "conv")
RATES = (100, 1000, 10_000)
"""Requests an hour, on average over a weekday."""

SLOTS = 12
"""In an hour."""

WEEKS = 12
WARM_UP_WEEKS = 2
SPIKE_SLOTS = 2 * SLOTS
MINIMUM_SHARE = 0.25
"""The rule's minimum amount, of the median hour of the scope: an operator sets it to what matters to them."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    costs: Array
    """Of each request, in dollars."""
    busyness: Array
    """Requests in each five minutes over their mean."""


@dataclass(frozen=True)
class Outcome:
    spikes: int
    found: int
    """Within an hour."""
    delays: list[float]
    """Minutes, of those found."""
    false_alarms: int
    scope_weeks: float


def read_trace(path: Path) -> Trace:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    costs = np.array([3e-6 * int(r["ContextTokens"]) + 15e-6 * int(r["GeneratedTokens"]) for r in rows])
    at = np.array([datetime.fromisoformat(r["TIMESTAMP"][:26]).timestamp() for r in rows])
    slots = np.bincount(((at - at.min()) // 300).astype(int))[:-1]  # without the last one, which the trace cuts
    return Trace(costs, slots / slots.mean())


def intensities(trace: Trace, rate: float, rng: np.random.Generator, weeks: int) -> Array:
    """Mean number of requests in each five minutes: [hours, SLOTS]."""
    hours = np.arange(weeks * HOURS_A_WEEK)
    daily = 1 + 0.6 * np.cos((hours % 24 - 14) / 24 * 2 * math.pi)
    weekend = np.where(hours % HOURS_A_WEEK >= 120, 0.4, 1.0)
    growth = 1.03 ** (hours / HOURS_A_WEEK)
    noise = np.empty(hours.size)
    state = 0.0
    for hour in hours:
        state = 0.5 * state + math.sqrt(0.75) * rng.normal()
        noise[hour] = math.exp(0.15 * state)
    busyness = rng.choice(trace.busyness, (hours.size, SLOTS))
    means: Array = (rate * daily * weekend * growth * noise)[:, None] / SLOTS * busyness
    return means


def _spend(trace: Trace, means: Array, rng: np.random.Generator) -> Array:
    counts = rng.poisson(means).ravel()
    costs = rng.choice(trace.costs, counts.sum())
    slot = np.repeat(np.arange(counts.size), counts)
    sums = np.bincount(slot, weights=costs, minlength=counts.size)
    return np.asarray(sums, np.float64).reshape(means.shape)


def openings(spend: Array, usual: list[Baseline | None], rule: Spike, minimum: float) -> Iterator[int]:
    """Slots at whose end an alert opens."""
    open_until = -1
    hourly, so_far = spend.sum(axis=1), spend.cumsum(axis=1)
    flat = np.concatenate(([0.0], spend.ravel().cumsum()))
    for at in range(SLOTS, spend.size):
        last, now = usual[at // SLOTS - 1], usual[at // SLOTS]
        if now is None or last is None:
            continue
        passed = (at % SLOTS + 1) / SLOTS
        spent = so_far[at // SLOTS, at % SLOTS] + (1 - passed) * hourly[at // SLOTS - 1]  # as sums by the hour tell it
        state = stands_out(rule, minimum, between(last, now, passed), float(spent))
        if state != "clear":  # then the ledger is asked for the sixty minutes themselves
            state = stands_out(rule, minimum, between(last, now, passed), float(flat[at + 1] - flat[at + 1 - SLOTS]))
        if state == "firing" and at > open_until:
            yield at
        if state == "firing" or (state == "holding" and at <= open_until):
            open_until = at + rule.clear_minutes // 5


def baselines(spend: Array) -> list[Baseline | None]:
    hourly = spend.sum(axis=1)
    longest = LONGEST_HISTORY_WEEKS * HOURS_A_WEEK
    return [baseline(hourly[max(0, hour - longest) : hour]) for hour in range(len(hourly))]


def judge(trace: Trace, rate: float, spikes: int, rng: np.random.Generator) -> Outcome:
    """One scope: `WEEKS` of traffic, and so many spikes in it, one at a time."""
    means = intensities(trace, rate, rng, WEEKS)
    spend = _spend(trace, means, rng)
    usual = baselines(spend)
    rule = Spike()
    minimum = MINIMUM_SHARE * float(np.median(spend.sum(axis=1)))
    first = WARM_UP_WEEKS * HOURS_A_WEEK
    window = slice(first - 1, None)
    false_alarms = sum(1 for _ in openings(spend[window], usual[window], rule, minimum))
    delays: list[float] = []
    for start in rng.integers(first * SLOTS, spend.size - SPIKE_SLOTS - SLOTS, spikes):
        more = np.zeros(spend.size)  # with what was there: three times
        more[start : start + SPIKE_SLOTS] = _spend(trace, 2 * means.ravel()[start : start + SPIKE_SLOTS], rng)
        spiked = spend + more.reshape(spend.shape)
        hour = int(start) // SLOTS
        near = slice(hour - 2, hour + 3)  # the baselines of these hours are of the past before the spike, or nearly
        opened = [(hour - 2) * SLOTS + at for at in openings(spiked[near], usual[near], rule, minimum)]
        after = [at for at in opened if start <= at < start + SLOTS]
        if after:
            delays.append(5.0 * (after[0] - int(start) + 1))
    return Outcome(spikes, len(delays), delays, false_alarms, float(WEEKS - WARM_UP_WEEKS))


def run(
    data: Path, scopes: int, spikes: int, seed: int = 1, rates: tuple[int, ...] = RATES
) -> dict[str, list[Outcome]]:
    """Outcomes by group of scopes; `scopes` of each service and rate."""
    rng = np.random.default_rng(seed)
    groups: dict[str, list[Outcome]] = {}
    for service in SERVICES:
        trace = read_trace(data / f"azure_llm_2023_{service}.csv")
        for rate in rates:
            groups[f"{service}, {rate} requests an hour"] = [judge(trace, rate, spikes, rng) for _ in range(scopes)]
    return groups


def total(outcomes: list[Outcome]) -> Outcome:
    return Outcome(
        sum(each.spikes for each in outcomes),
        sum(each.found for each in outcomes),
        [delay for each in outcomes for delay in each.delays],
        sum(each.false_alarms for each in outcomes),
        sum(each.scope_weeks for each in outcomes),
    )


def report(groups: dict[str, list[Outcome]]) -> Report:
    result = Report(
        notes=["alerts: spikes of spend, three times the usual, on traffic made from the Azure traces of 2023"]
    )
    everything = [outcome for group in groups.values() for outcome in group]
    for name, outcomes in {**groups, "all": everything}.items():
        all_of_it = total(outcomes)
        figures = {
            "spikes found within an hour": (100 * all_of_it.found / all_of_it.spikes, "%"),
            "minutes until found, median": (float(np.median(all_of_it.delays or [math.nan])), "min"),
            "false alarms a week": (all_of_it.false_alarms / all_of_it.scope_weeks, ""),
        }
        for metric, (value, unit) in figures.items():
            result.rows.append(Row(name, "farthing", metric, value, unit, value, value, 1))
    worst = max(outcome.false_alarms / outcome.scope_weeks for outcome in everything)
    result.ratios["spikes found within an hour, of all"] = total(everything).found / total(everything).spikes
    result.targets["spikes found within an hour, of all"] = "0.95"
    result.ratios["false alarms a week, worst scope"] = worst
    result.targets["false alarms a week, worst scope"] = "<1"
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with azure_llm_2023_code.csv and …_conv.csv")
    parser.add_argument("--json", type=Path, help="write the results here; without it, tables on the terminal")
    parser.add_argument("--scopes", type=int, default=4, help="of each service and rate")
    parser.add_argument("--spikes", type=int, default=50, help="in each scope, one at a time")
    options = parser.parse_args()
    missing = [name for name in SERVICES if not (options.data / f"azure_llm_2023_{name}.csv").exists()]
    if missing:
        parser.error(f"{options.data} has no azure_llm_2023_{missing[0]}.csv; say with --data where it is")
    report(run(options.data, options.scopes, options.spikes)).emit(options.json, ["numpy"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
