"""The schema: one SQLAlchemy `Table` a noun, one module a subject.

Alembic compares `metadata` with the database; nothing else defines it.

Money is NUMERIC in currency units, never rounded here; NULL means unknown. `operation` and `attempt` are partitioned by
range of their UUIDv7 id, one partition a day: the id carries the time, so a resend lands in the same partition as the
first send and the primary key rejects it.
"""

from billing.tables.base import Timestamp, metadata
from billing.tables.budgets import budget, budget_window, lease
from billing.tables.files import (
    BATCH_IS_OPEN,
    BATCH_MOMENTS,
    BATCH_STATUSES,
    BATCH_USAGE,
    OPEN_BATCH_STATUSES,
    batch,
    batch_line,
    file,
    file_chunk,
)
from billing.tables.ledger import attempt, operation, operation_set_aside
from billing.tables.people import api_key, app_user, key_secret, org, team
from billing.tables.prices import price_version

__all__ = [
    "BATCH_IS_OPEN",
    "BATCH_MOMENTS",
    "BATCH_STATUSES",
    "BATCH_USAGE",
    "OPEN_BATCH_STATUSES",
    "Timestamp",
    "api_key",
    "app_user",
    "attempt",
    "batch",
    "batch_line",
    "budget",
    "budget_window",
    "file",
    "file_chunk",
    "key_secret",
    "lease",
    "metadata",
    "operation",
    "operation_set_aside",
    "org",
    "price_version",
    "team",
]
