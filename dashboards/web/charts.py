"""The figures of the overview, as Plotly's JSON, each with a sentence that says what it shows.

Colours are names of the style sheet's custom properties (`var(--…)`); `static/charts.js` puts in their values in the
reader's colour scheme. Amounts travel as strings of digits, which Plotly reads as numbers: none is a float here.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec

from billing.records import TOKEN_CLASSES, TokenClasses
from billing.reports import Spending
from billing.usage_rows import Step
from dashboards.web.names import CLASS_NAMES
from dashboards.web.numbers import aligned, count, percent, plain

Json = dict[str, Any]

HEIGHT = 248  # pixels; static/farthing.css keeps the same room free before the figure is drawn

TICKS = 6  # at most so many along the time axis: on a phone more would touch

CLASS_COLOURS = {
    "input_fresh": "var(--input-fresh)",
    "input_cached": "var(--input-cached)",
    "input_cache_write": "var(--input-cache-write)",
    "output_text": "var(--output-text)",
    "output_reasoning": "var(--output-reasoning)",
}


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """Used in element ids."""
    title: str
    summary: str
    """One sentence: the text alternative, also shown under the title."""
    figure: Json


def spending_chart(
    points: Sequence[tuple[datetime, Spending]], step: Step, currency: str, *, costs: bool = True
) -> Chart:
    """Billed as bars; where `costs` are shown, cost as a line with a gap where it is unknown."""
    billed = [spending.billed for _, spending in points]
    at = _axis_times(points)
    traces: list[Json] = [
        {
            "type": "bar",
            "name": "Billed",
            "x": at,
            "y": [_digits(amount) for amount in billed],
            "marker": {"color": "var(--billed)"},
            "customdata": [_hover(amount, currency) for amount in billed],
            "hovertemplate": "%{customdata}<extra>Billed</extra>",
        },
    ]
    if costs:
        traces.append(_cost_line(at, [spending.cost for _, spending in points], currency))
    known = [(amount, at) for (at, _), amount in zip(points, billed, strict=True) if amount]
    summary = f"Nothing billed in any {step}."
    if known:
        most, when = max(known)
        summary = f"Most was billed {_when(when, step)}: {aligned(most)} {currency}."
    layout = _layout(points, step, yaxis={"tickformat": ",.6~f", "rangemode": "tozero"})
    return Chart(name="spending", title=f"Spend by {step}, {currency}", summary=summary, figure=_figure(traces, layout))


def _cost_line(at: list[str], cost: Sequence[Decimal | None], currency: str) -> Json:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "Cost",
        "x": at,
        "y": [_digits(amount) for amount in cost],
        "line": {"color": "var(--cost)", "width": 2},
        "marker": {"color": "var(--cost)", "size": 5},
        "customdata": [_hover(amount, currency) for amount in cost],
        "hovertemplate": "%{customdata}<extra>Cost</extra>",
    }


def tokens_chart(points: Sequence[tuple[datetime, TokenClasses]], step: Step) -> Chart:
    """The token classes stacked; a class without a token in the period is left out."""
    sums = {name: sum(getattr(tokens, name) for _, tokens in points) for name in TOKEN_CLASSES}
    traces = [
        {
            "type": "bar",
            "name": CLASS_NAMES[name],
            "x": _axis_times(points),
            "y": [getattr(tokens, name) for _, tokens in points],
            "marker": {"color": CLASS_COLOURS[name]},
            "hovertemplate": "%{y:,}<extra>" + CLASS_NAMES[name] + "</extra>",
        }
        for name, total in sums.items()
        if total
    ]
    total = sum(sums.values())
    parts = [f"{percent(number, total)} {CLASS_NAMES[name].lower()}" for name, number in sums.items() if number]
    summary = f"{count(total)} tokens: {', '.join(parts)}." if total else f"No tokens in any {step}."
    layout = _layout(points, step, yaxis={"tickformat": "~s"}, barmode="stack")
    return Chart(name="tokens", title=f"Tokens by class, by {step}", summary=summary, figure=_figure(traces, layout))


def cache_chart(points: Sequence[tuple[datetime, TokenClasses]], step: Step) -> Chart:
    """Share of prompt tokens that the prefix cache answered, a gap where there was no prompt."""
    rates = [
        Decimal(tokens.input_cached * 100) / tokens.prompt_tokens if tokens.prompt_tokens else None
        for _, tokens in points
    ]
    shares = [percent(tokens.input_cached, tokens.prompt_tokens) for _, tokens in points]
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "Prefix cache hit rate",
        "x": _axis_times(points),
        "y": [None if rate is None else f"{rate:.3f}" for rate in rates],
        "line": {"color": "var(--input-cached)", "width": 2},
        "marker": {"color": "var(--input-cached)", "size": 5},
        "customdata": [
            f"{share or '–'} of {count(tokens.prompt_tokens)} prompt tokens"
            for share, (_, tokens) in zip(shares, points, strict=True)
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    known = [(rate, at) for rate, (at, _) in zip(rates, points, strict=True) if rate is not None]
    summary = f"No prompt tokens in any {step}."
    if known:
        (low, low_at), (high, high_at) = min(known), max(known)
        summary = f"Between {low:.1f}% ({_when(low_at, step)}) and {high:.1f}% ({_when(high_at, step)})."
    layout = _layout(points, step, yaxis={"ticksuffix": "%", "range": [0, 100], "dtick": 25}, showlegend=False)
    title = f"Prefix cache hit rate, by {step}"
    return Chart(name="cache", title=title, summary=summary, figure=_figure([trace], layout))


def _figure(traces: list[Json], layout: Json) -> Json:
    return {"data": traces, "layout": layout}


def _layout(points: Sequence[tuple[datetime, Any]], step: Step, yaxis: Json, **more: Any) -> Json:
    quiet = {"fixedrange": True, "zeroline": False, "color": "var(--muted)"}
    every = -(-len(points) // TICKS)
    room = 0.75 * (timedelta(hours=1) if step == "hour" else timedelta(days=1))  # for the outer bars' other halves
    tick = {
        "tickformat": "%H:%M" if step == "hour" else "%-d %b",
        "tickvals": _axis_times(points[::-every][::-1]),  # counted from the last, so that the running step has one
        "tickangle": 0,
        "range": [f"{at:%Y-%m-%d %H:%M}" for at in (points[0][0] - room, points[-1][0] + room)],
    }
    return {
        "height": HEIGHT,
        "margin": {"l": 8, "r": 16, "t": 34 if more.get("showlegend", True) else 10, "b": 26},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--muted)"},
        "bargap": 0.28,
        "dragmode": False,
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": "var(--surface)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)", "size": 12},
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "itemclick": False,
            "traceorder": "normal",
        },
        "xaxis": {**quiet, **tick, "type": "date", "showgrid": False, "linecolor": "var(--line)"},
        "yaxis": {**quiet, "automargin": True, "gridcolor": "var(--line)", "nticks": 5, **yaxis},
        **more,
    }


def _axis_times(points: Sequence[tuple[datetime, Any]]) -> list[str]:
    return [f"{at:%Y-%m-%d %H:%M}" for at, _ in points]  # without an offset: Plotly shows times as they are written


def _when(at: datetime, step: Step) -> str:
    return f"at {at:%H:%M}" if step == "hour" else f"on {at.day} {at:%b}"


def _digits(amount: Decimal | None) -> str | None:
    return None if amount is None else plain(amount)


def _hover(amount: Decimal | None, currency: str) -> str:
    return "unknown" if amount is None else f"{aligned(amount)} {currency}"
