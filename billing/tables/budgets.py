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
from sqlalchemy.dialects.postgresql import JSONB

from billing.tables.base import Timestamp, created, id_column, metadata

# What a scope may use up in a window: money (a budget) or anything else that is counted (a limit).
budget = Table(
    "budget",
    metadata,
    id_column(),
    Column("scope_kind", Text, nullable=False),
    Column("scope_id", Text, nullable=False),
    Column(
        "also",
        JSONB,
        nullable=False,
        server_default=text("'{}'"),
        comment="other scopes that a call must have too, kind: id; the scope itself is the narrowest",
    ),
    Column("unit", Text, nullable=False, server_default="money", comment="money, requests, tokens or concurrent"),
    Column("window", Text, nullable=False, comment="minute (of a limit), hour, day, week, month or none"),
    Column("time_zone", Text, nullable=False, server_default="UTC"),
    Column("limit_amount", Numeric, nullable=False),
    Column("currency", Text, nullable=True, comment="of money"),
    Column("hard", Boolean, nullable=False, server_default=text("true")),
    Column("rolls_since", Timestamp, nullable=True, comment="the first window whose rest adds to the next; NULL: none"),
    Column("rollover_cap", Numeric, nullable=True, comment="the most that is carried into a window; NULL: no cap"),
    Column("prepaid", Boolean, nullable=False, server_default=text("false"), comment="a wallet"),
    Column("closed_at", Timestamp, nullable=True, comment="of a wallet; NULL: it is open"),
    created(),
    UniqueConstraint("scope_kind", "scope_id", "also", "unit", "window", "prepaid"),
    CheckConstraint("limit_amount >= 0", name="limit_not_negative"),
    CheckConstraint("scope_kind IN ('org', 'team', 'user', 'key', 'tag', 'model')", name="scope_kind"),
    CheckConstraint("\"window\" IN ('minute', 'hour', 'day', 'week', 'month', 'none')", name="window"),
    CheckConstraint("unit IN ('money', 'requests', 'tokens', 'concurrent')", name="unit"),
    CheckConstraint("(unit = 'money') = (currency IS NOT NULL)", name="money_has_a_currency"),
    CheckConstraint("rolls_since IS NULL OR unit = 'money' AND \"window\" <> 'none'", name="money_rolls_over"),
    CheckConstraint("rollover_cap IS NULL OR rollover_cap >= 0 AND rolls_since IS NOT NULL", name="rollover_cap"),
    CheckConstraint("closed_at IS NULL OR prepaid", name="wallets_are_closed"),
    CheckConstraint(
        "NOT prepaid OR unit = 'money' AND \"window\" = 'none' AND hard AND limit_amount = 0", name="a_wallet_is_money"
    ),
)

budget_window = Table(
    "budget_window",
    metadata,
    Column("budget_id", ForeignKey("budget.id", ondelete="CASCADE"), primary_key=True),
    Column("starts_at", Timestamp, primary_key=True),
    Column("leased", Numeric, nullable=False, server_default=text("0")),
    Column("settled", Numeric, nullable=False, server_default=text("0")),
    Column(
        "added",
        Numeric,
        nullable=False,
        server_default=text("0"),
        comment="on top of the limit: what rolled over into it, or the credit of a wallet",
    ),
    Column("limit_amount", Numeric, nullable=True, comment="of a budget that rolls over: its limit in this window"),
    CheckConstraint("leased >= 0", name="leased_not_negative"),
    CheckConstraint("settled >= 0", name="settled_not_negative"),
    CheckConstraint("added >= 0", name="added_not_negative"),
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
    ForeignKeyConstraint(
        ["budget_id", "starts_at"], ["budget_window.budget_id", "budget_window.starts_at"], ondelete="CASCADE"
    ),
    CheckConstraint("settled >= 0", name="settled_not_negative"),
    CheckConstraint("granted >= settled", name="settled_was_granted"),
    Index(None, "replica"),
)

# A gateway process that has or had leases.
replica = Table(
    "replica",
    metadata,
    Column("name", Text, primary_key=True, comment="place.run of the process's spool"),
    created(),
    Column("renewed_at", Timestamp, nullable=False, server_default=func.now(), comment="when it last said it lives"),
    Column("freed_at", Timestamp, nullable=True, comment="when it was taken for dead, and has not heard of it yet"),
)

# What is left of one top-up. The credit of a wallet is the sum of its rows here; the order in which they are used is
# that of their end.
wallet_credit = Table(
    "wallet_credit",
    metadata,
    id_column(),
    Column("wallet_id", ForeignKey("budget.id"), nullable=False),
    Column("rest", Numeric, nullable=False),
    Column("expires_at", Timestamp, nullable=True),
    CheckConstraint("rest >= 0", name="rest_not_negative"),
    Index("ix_wallet_credit_open", "wallet_id", "expires_at", postgresql_where=text("rest > 0")),
)

# Only ever added to. The sum of a wallet's entries is its balance.
wallet_entry = Table(
    "wallet_entry",
    metadata,
    id_column(),
    Column("wallet_id", ForeignKey("budget.id"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("amount", Numeric, nullable=False, comment="added to the balance; what is taken is below 0"),
    Column("credit_id", Uuid, nullable=True, comment="of which top-up; NULL: of none, the wallet had nothing left"),
    Column("expires_at", Timestamp, nullable=True, comment="of a top-up"),
    Column(
        "uncollected",
        Numeric,
        nullable=False,
        server_default=text("0"),
        comment="of a capture: charged and not there to be taken",
    ),
    Column("note", Text, nullable=True),
    Column("actor", Text, nullable=True, comment="who made it; NULL: the ledger"),
    created(),
    CheckConstraint("kind IN ('top_up', 'capture', 'expiry', 'refund', 'adjustment')", name="kind"),
    CheckConstraint(
        "CASE WHEN kind IN ('top_up', 'refund') THEN amount > 0 WHEN kind = 'adjustment' THEN amount <> 0"
        " ELSE amount <= 0 END",
        name="sign",
    ),
    Index(None, "wallet_id", "id"),
)
