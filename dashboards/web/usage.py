"""Who cost what, with what margin, by whatever is asked for: the rows of `farthing usage` as a page."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.breakdown import DIMENSIONS, UsageRow, usage_by
from billing.filters import Filters
from billing.reports import Within
from billing.tables import usage_day_tag
from dashboards.web.overview import Period, start_of

MOST = 200
"""Rows on a page; the shell and exports have them all."""
MOST_TAGS = 20

NAMES = {
    "user": "User",
    "team": "Team",
    "org": "Organisation",
    "key": "Key",
    "model": "Model",
    "day": "Day",
    "hour": "Hour",
}
_WITHIN_AN_ORG = ("user", "team", "key")
"""Two organisations may have one of the same name."""
_OF_A_MEMBER = ("key", "model", "day", "hour")


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    by: str
    period: Period
    now: datetime
    choices: dict[str, str]
    """What usage can be shown by -> its name."""
    rows: list[UsageRow]
    left_out: int
    """Further rows."""
    several_orgs: bool
    totals: list[UsageRow]
    """Of all operations in the period, whether in a row or not, one for each currency."""

    @property
    def biggest(self) -> Decimal:
        """What bars are measured by."""
        return max((row.billed for row in self.rows if row.billed), default=Decimal(0))


def choices(within: Within, tags: Sequence[str], period: Period) -> dict[str, str]:
    names = _OF_A_MEMBER if within.user_id is not None else DIMENSIONS
    left_out = {"org"} if within.org_id is not None else set()
    if period.step != "hour":  # more rows than are shown, and of a large ledger slow to sum up
        left_out.add("hour")
    shown = {name: NAMES[name] for name in names if name not in left_out}
    return shown if within.user_id is not None else shown | {f"tag:{name}": name for name in tags}


async def gather(connection: AsyncConnection, by: str, period: Period, now: datetime, within: Within) -> Usage | None:
    """None when usage is not shown by that to who asks. `now` is in UTC. Hours are shown of one day, else its days."""
    if by == "hour" and period.step != "hour":
        by = "day"
    start = start_of(period, now)
    tags = await _tags(connection, start, within)
    asked = by.removeprefix("tag:")
    if asked not in (by, "", *tags):
        tags.append(asked)  # its operations may not be summed up yet
    offered = choices(within, tags, period)
    if by not in offered:
        return None
    end = now + timedelta(microseconds=1)
    filters = Filters(org_id=within.org_id, user_id=within.user_id)
    dimensions = ["org", by] if by in _WITHIN_AN_ORG else [by]
    rows = await usage_by(connection, dimensions, start, end, filters)
    return Usage(
        by=by,
        period=period,
        now=now,
        choices=offered,
        rows=rows[:MOST],
        left_out=len(rows[MOST:]),
        several_orgs=len({row.by.get("org") for row in rows}) > 1,
        totals=await usage_by(connection, [], start, end, filters),
    )


async def _tags(connection: AsyncConnection, start: datetime, within: Within) -> list[str]:
    """Names of tags that operations of the period carry, as far as they are summed up."""
    rows = usage_day_tag
    query = select(rows.c.name).where(rows.c.bucket >= start).distinct().order_by(rows.c.name).limit(MOST_TAGS)
    if within.org_id is not None:
        query = query.where(rows.c.org_id == within.org_id)
    return list((await connection.execute(query)).scalars())
