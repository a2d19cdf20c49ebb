"""The schema: one SQLAlchemy `Table` a noun, one module a subject.

Alembic compares `metadata` with the database; nothing else defines it.

Money is NUMERIC in currency units, never rounded here; NULL means unknown. `operation` and `attempt` are partitioned by
range of their UUIDv7 id, one partition a day: the id carries the time, so a resend lands in the same partition as the
first send and the primary key rejects it.
"""

from billing.tables.administrators import admin_token, administrator, audit_log, idempotent_write
from billing.tables.alerts import (
    alert,
    alert_channel,
    alert_delivery,
    alert_rule,
    alert_silence,
    replica_health,
)
from billing.tables.base import Timestamp, metadata
from billing.tables.budgets import budget, budget_window, lease, replica, wallet_credit, wallet_entry
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
from billing.tables.invoices import invoice, invoice_line
from billing.tables.ledger import attempt, operation, operation_set_aside
from billing.tables.payloads import payload
from billing.tables.people import api_key, app_user, key_secret, org, team
from billing.tables.prices import adjustment, device_account, device_hour, price_version
from billing.tables.usage import usage_day, usage_day_tag, usage_dropped, usage_hour, usage_hour_tag, usage_stale

__all__ = [
    "BATCH_IS_OPEN",
    "BATCH_MOMENTS",
    "BATCH_STATUSES",
    "BATCH_USAGE",
    "OPEN_BATCH_STATUSES",
    "Timestamp",
    "adjustment",
    "admin_token",
    "administrator",
    "alert",
    "alert_channel",
    "alert_delivery",
    "alert_rule",
    "alert_silence",
    "api_key",
    "app_user",
    "attempt",
    "audit_log",
    "batch",
    "batch_line",
    "budget",
    "budget_window",
    "device_account",
    "device_hour",
    "file",
    "file_chunk",
    "idempotent_write",
    "invoice",
    "invoice_line",
    "key_secret",
    "lease",
    "metadata",
    "operation",
    "operation_set_aside",
    "org",
    "payload",
    "price_version",
    "replica",
    "replica_health",
    "team",
    "usage_day",
    "usage_day_tag",
    "usage_dropped",
    "usage_hour",
    "usage_hour_tag",
    "usage_stale",
    "wallet_credit",
    "wallet_entry",
]
