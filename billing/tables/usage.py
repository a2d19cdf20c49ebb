"""What it came to: sums of the ledger per hour and day, in partitions by month of their bucket.

All of it can be computed again from the ledger, except rows of ledger days that retention has dropped: those say so in
`dropped`, and stay as they are.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    Date,
    Identity,
    Index,
    Numeric,
    Table,
    Text,
    TextClause,
    UniqueConstraint,
    Uuid,
    text,
)

from billing.records import TOKEN_CLASSES
from billing.tables.base import Timestamp, metadata

COUNTS = (
    *("operations", "failed", "refused", "invalid", "client_closed", "routed", "cache_hits"),
    *TOKEN_CLASSES,
    *("billed_unknown", "cost_unknown", "cache_saved_unknown"),
    *("cached_answers", "saved_prompt_tokens", "saved_completion_tokens", "cached_answers_saved_unknown"),
)
"""Measures that are whole numbers."""
SUMS = ("billed", "cost", "margin")
"""Measures that are NULL where nothing of them is known."""
AMOUNTS = ("billed_adjustment", "cost_adjustment", "cache_saved", "cached_answers_saved")
"""Measures that are 0 where there is none."""
MEASURES = (*COUNTS, *SUMS, *AMOUNTS)
CACHED_ANSWERS = (
    *("cached_answers", "saved_prompt_tokens", "saved_completion_tokens"),
    *("cached_answers_saved", "cached_answers_saved_unknown"),
)
"""Measures of the response cache. A gateway of a version before them may run on after a migration: 0 in its rows."""

OWNERS = ("org_id", "team_id", "user_id", "key_id", "model", "currency")
"""What a row of `usage_hour` and `usage_day` is about."""
TAGS = ("org_id", "name", "value", "model", "currency")
"""What a row of `usage_hour_tag` and `usage_day_tag` is about: one tag, with all operations that carry it."""


def _usage(table: str, about: tuple[str, ...]) -> Table:
    return Table(
        table,
        metadata,
        Column("bucket", Timestamp, nullable=False, comment="start of the hour or day, UTC"),
        *(
            Column(name, Uuid if name.endswith("_id") else Text, nullable=name in ("team_id", "user_id"))
            for name in about
        ),
        Column("dropped", Date, nullable=True, comment="the ledger's day that these were in, where it is dropped"),
        *(Column(name, BigInteger, nullable=False, server_default=_default(name)) for name in COUNTS),
        *(Column(name, Numeric, nullable=True) for name in SUMS),
        *(Column(name, Numeric, nullable=False, server_default=_default(name)) for name in AMOUNTS),
        UniqueConstraint("bucket", *about, "dropped", name=f"uq_{table}", postgresql_nulls_not_distinct=True),
        postgresql_partition_by="RANGE (bucket)",
    )


def _default(measure: str) -> TextClause | None:
    return text("0") if measure in CACHED_ANSWERS else None


usage_hour = _usage("usage_hour", OWNERS)
usage_day = _usage("usage_day", OWNERS)
usage_hour_tag = _usage("usage_hour_tag", TAGS)
usage_day_tag = _usage("usage_day_tag", TAGS)

# Hours whose sums are out of date. Only ever appended to by writers, so they never wait for each other.
usage_stale = Table(
    "usage_stale",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("bucket", Timestamp, nullable=False),
    Index(None, "bucket"),
)

# Nothing else tells of them: reports say what they lack.
usage_dropped = Table(
    "usage_dropped",
    metadata,
    Column("day", Date, primary_key=True, comment="of the ledger, UTC"),
)
"""Days of the ledger whose rows retention has dropped, and then the sums of them."""
