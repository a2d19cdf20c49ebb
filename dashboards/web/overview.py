"""What the overview shows for one period, gathered from the ledger and put in the order the page shows it."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from decimal import Decimal

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import reports
from billing.charge import total
from billing.devices import device_hours
from billing.filters import Filters
from billing.forecast import Forecast, forecast_month
from billing.operations import OperationSummary, latest_operations
from billing.records import TOKEN_CLASSES, TokenClasses
from billing.reports import (
    EVERYTHING,
    CacheSaving,
    CurrencySpending,
    ModelShare,
    Spending,
    UserSpending,
    Within,
)
from billing.usage_rows import Step
from dashboards.web.charts import Chart, cache_chart, spending_chart, tokens_chart


class Period(msgspec.Struct, frozen=True):
    slug: str
    name: str
    days: int
    """Calendar days in UTC, today included."""
    step: Step


PERIODS = (
    Period("today", "Today", 1, "hour"),
    Period("7d", "7 days", 7, "day"),
    Period("30d", "30 days", 30, "day"),
)

NO_SPENDING = Spending(
    operations=0,
    failed=0,
    refused=0,
    billed=Decimal(0),
    billed_unknown=0,
    cost=Decimal(0),
    cost_unknown=0,
    margin=Decimal(0),
)


class Model(msgspec.Struct, frozen=True):
    share: ModelShare
    tokens: TokenClasses


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    now: datetime
    period: Period
    currency: str
    """The one with most operations; the charts are in it."""
    windows: tuple[Spending, ...]
    """One for each of PERIODS, in `currency`."""
    other_currencies: list[CurrencySpending]
    spending: Spending
    """Of `windows`, the one of `period`."""
    users: list[UserSpending]
    several_orgs: bool
    incomplete: bool
    """Some amount that is shown of some operation is unknown."""
    models: list[Model]
    model_operations: int
    tokens: TokenClasses
    saving: CacheSaving
    """In `currency`."""
    idle: Decimal | None
    """What the devices' idle time in the period cost, in `currency`; None where it is not for who asks, or unknown."""
    forecast: Forecast | None
    """Of the month that runs, in `currency`; None where neither it nor the four weeks before have an operation."""
    spending_points: list[tuple[datetime, Spending]]
    token_points: list[tuple[datetime, TokenClasses]]
    charts: dict[str, Chart]
    latest: list[OperationSummary]


def start_of(period: Period, now: datetime) -> datetime:
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight - timedelta(days=period.days - 1)


def steps(period: Period, now: datetime) -> list[datetime]:
    """Start of every hour or day of the period, the running one last."""
    length = timedelta(hours=1) if period.step == "hour" else timedelta(days=1)
    found = [start_of(period, now)]
    while found[-1] + length <= now:
        found.append(found[-1] + length)
    return found


async def gather(
    connection: AsyncConnection, period: Period, now: datetime, within: Within = EVERYTHING, *, costs: bool = True
) -> Overview | None:
    """None when the ledger holds no operation at all. `now` is in UTC. `costs`: whether the chart shows them."""
    latest = await latest_operations(connection, 10, within=within)
    if not latest:
        return None
    starts = [start_of(each, now) for each in PERIODS]
    start = start_of(period, now)
    totals = await reports.total_spending(connection, starts, within=within)
    currency = totals[0].currency if totals else latest[0].currency
    windows = totals[0].windows if totals else (NO_SPENDING,) * len(PERIODS)
    token_rows = await reports.tokens_over_time(connection, start, period.step, within=within)
    shares = await reports.model_shares(connection, start, within=within)
    users = await reports.user_spending(connection, starts, within=within)
    savings = await reports.cache_savings(connection, start, within=within)
    filters = Filters(org_id=within.org_id, user_id=within.user_id)
    forecasts = await forecast_month(connection, filters, now=now)
    in_time = {
        point.at: point.spending
        for point in await reports.spending_over_time(connection, start, period.step, within=within)
        if point.currency == currency
    }
    every_step = steps(period, now)
    spending_points = [(at, in_time.get(at, NO_SPENDING)) for at in every_step]
    token_points = [(at, add(row.tokens for row in token_rows if row.at == at)) for at in every_step]
    return Overview(
        now=now,
        period=period,
        currency=currency,
        windows=windows,
        other_currencies=totals[1:],
        spending=windows[PERIODS.index(period)],
        users=users,
        several_orgs=len({user.org for user in users}) > 1,
        incomplete=any(
            window.billed_unknown or (costs and window.cost_unknown) for row in totals for window in row.windows
        ),
        models=[Model(share, add(row.tokens for row in token_rows if row.model == share.model)) for share in shares],
        model_operations=sum(share.spending.operations for share in shares),
        tokens=add(row.tokens for row in token_rows),
        saving=next((saving for saving in savings if saving.currency == currency), _no_saving(currency)),
        idle=await _idle(connection, start, now, currency) if costs and within == EVERYTHING else None,
        forecast=next((each for each in forecasts if each.currency == currency), None),
        spending_points=spending_points,
        token_points=token_points,
        charts={
            "spending": spending_chart(spending_points, period.step, currency, costs=costs),
            "tokens": tokens_chart(token_points, period.step),
            "cache": cache_chart(token_points, period.step),
        },
        latest=latest,
    )


def _no_saving(currency: str) -> CacheSaving:
    return CacheSaving(
        currency=currency,
        amount=Decimal(0),
        unpriced_tokens=0,
        answers=0,
        answers_tokens=0,
        answers_amount=Decimal(0),
        answers_unknown=0,
    )


async def _idle(connection: AsyncConnection, start: datetime, end: datetime, currency: str) -> Decimal | None:
    hours = await device_hours(connection, start, end)
    return total(hour.idle_cost for hour in hours if hour.currency == currency)


def add(several: Iterable[TokenClasses]) -> TokenClasses:
    rows = list(several)
    return TokenClasses(**{name: sum(getattr(row, name) for row in rows) for name in TOKEN_CLASSES})
