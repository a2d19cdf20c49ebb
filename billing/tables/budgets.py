"""What a scope may use up, and what is taken out of it: budgets, limits, their windows, leases."""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Numeric,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)

from billing.tables.base import Timestamp, created, id_column, metadata

# What a scope may use up in a window: money (a budget) or anything else that is counted (a limit).
budget = Table(
    "budget",
    metadata,
    id_column(),
    Column("scope_kind", Text, nullable=False),
    Column("scope_id", Text, nullable=False),
    Column("unit", Text, nullable=False, server_default="money", comment="money, requests, tokens or concurrent"),
    Column("window", Text, nullable=False, comment="minute (of a limit), hour, day, week, month or none"),
    Column("time_zone", Text, nullable=False, server_default="UTC"),
    Column("limit_amount", Numeric, nullable=False),
    Column("currency", Text, nullable=True, comment="of money"),
    Column("hard", Boolean, nullable=False, server_default=text("true")),
    created(),
    UniqueConstraint("scope_kind", "scope_id", "unit", "window"),
    CheckConstraint("limit_amount >= 0", name="limit_not_negative"),
    CheckConstraint("scope_kind IN ('org', 'team', 'user', 'key', 'tag', 'model')", name="scope_kind"),
    CheckConstraint("\"window\" IN ('minute', 'hour', 'day', 'week', 'month', 'none')", name="window"),
    CheckConstraint("unit IN ('money', 'requests', 'tokens', 'concurrent')", name="unit"),
    CheckConstraint("(unit = 'money') = (currency IS NOT NULL)", name="money_has_a_currency"),
)

budget_window = Table(
    "budget_window",
    metadata,
    Column("budget_id", ForeignKey("budget.id", ondelete="CASCADE"), primary_key=True),
    Column("starts_at", Timestamp, primary_key=True),
    Column("leased", Numeric, nullable=False, server_default=text("0")),
    Column("settled", Numeric, nullable=False, server_default=text("0")),
    CheckConstraint("leased >= 0", name="leased_not_negative"),
    CheckConstraint("settled >= 0", name="settled_not_negative"),
)

# What a gateway process has taken out of a window: `leased` there is the sum of granted - settled here.
lease = Table(
    "lease",
    metadata,
    Column("budget_id", Uuid, primary_key=True),
    Column("starts_at", Timestamp, primary_key=True),
    Column("replica", Text, primary_key=True, comment="place.run of the process's spool"),
    Column("granted", Numeric, nullable=False, comment="taken out and not given back"),
    Column("settled", Numeric, nullable=False, server_default=text("0"), comment="of it, what the ledger has charged"),
    Column("renewed_at", Timestamp, nullable=False, server_default=func.now(), comment="on a limit of calls at once"),
    ForeignKeyConstraint(
        ["budget_id", "starts_at"], ["budget_window.budget_id", "budget_window.starts_at"], ondelete="CASCADE"
    ),
    CheckConstraint("settled >= 0", name="settled_not_negative"),
    CheckConstraint("granted >= settled", name="settled_was_granted"),
    Index(None, "replica"),
)
