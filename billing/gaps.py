"""Days that retention has dropped from the ledger: what reads its rows lacks them, what reads the sums does not."""

from datetime import date, datetime, timedelta

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.filters import Filters
from billing.tables import usage_hour


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Days (UTC) with operations that are in the ledger no longer."""

    days: int
    first: date
    last: date

    def __str__(self) -> str:
        which = f"{self.first}" if self.days == 1 else f"{self.days} days from {self.first} to {self.last}"
        return (
            f"retention has dropped {which} from the ledger: what was called then is not in this; `farthing usage` "
            "still has what it came to"
        )


async def gap(
    conn: AsyncConnection,
    start: datetime,
    end: datetime,
    filters: Filters = Filters(),  # noqa: B008 - frozen
) -> Gap | None:
    """What operations that started in [start, end) and answer `filters` (its tag apart) have lost; None: nothing."""
    dropped, bucket = usage_hour.c.dropped, usage_hour.c.bucket
    query = select(func.count(dropped.distinct()), func.min(dropped), func.max(dropped)).where(
        dropped.is_not(None), bucket > start - timedelta(hours=1), bucket < end
    )
    for name in ("org_id", "team_id", "user_id", "key_id", "model", "currency"):
        if (value := getattr(filters, name)) is not None:
            query = query.where(usage_hour.c[name] == value)
    days, first, last = (await conn.execute(query)).one()
    return Gap(days=days, first=first, last=last) if days else None
