"""Alerts: the rules, channels and silences that an operator sets, and what comes of them by itself."""

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from billing.tables.base import Timestamp, created, id_column, metadata

_SCOPES = "('all', 'org', 'team', 'user', 'key', 'tag', 'model')"

alert_rule = Table(
    "alert_rule",
    metadata,
    id_column(),
    Column("kind", Text, nullable=False),
    Column("scope_kind", Text, nullable=False),
    Column("scope_id", Text, nullable=False, comment="as a budget's; * for each of the kind; empty for all"),
    Column("parameters", JSONB, nullable=False, server_default=text("'{}'"), comment="those that are not the default"),
    Column("channels", ARRAY(Text), nullable=True, comment="names; NULL: every channel"),
    Column("enabled", Boolean, nullable=False, server_default=text("true")),
    created(),
    UniqueConstraint("kind", "scope_kind", "scope_id"),
    CheckConstraint(f"scope_kind IN {_SCOPES}", name="scope_kind"),
    CheckConstraint("(scope_kind = 'all') = (scope_id = '')", name="all_has_no_id"),
)

alert_channel = Table(
    "alert_channel",
    metadata,
    Column("name", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("address", Text, nullable=False, comment="where the URL is read: env:NAME or file:/PATH; never the URL"),
    Column("secret", Text, nullable=True, comment="where the signing secret is read, likewise"),
    Column("sender", Text, nullable=True, comment="of e-mail"),
    Column("recipients", ARRAY(Text), nullable=True, comment="of e-mail"),
    created(),
    CheckConstraint("kind IN ('webhook', 'slack', 'feishu', 'dingtalk', 'wecom', 'email')", name="kind"),
    CheckConstraint("address ~ '^(env|file):'", name="address_is_a_reference"),
    CheckConstraint("secret ~ '^(env|file):'", name="secret_is_a_reference"),
    CheckConstraint("(kind = 'email') = (recipients IS NOT NULL)", name="email_has_recipients"),
)

alert_silence = Table(
    "alert_silence",
    metadata,
    id_column(),
    Column("rule_id", ForeignKey("alert_rule.id", ondelete="CASCADE"), nullable=True, comment="NULL: every rule"),
    Column("scope_kind", Text, nullable=True, comment="NULL: every scope"),
    Column("scope_id", Text, nullable=True),
    Column("until", Timestamp, nullable=False),
    Column("reason", Text, nullable=False),
    created(),
    CheckConstraint("(scope_kind IS NULL) = (scope_id IS NULL)", name="scope_is_whole"),
)

# One row an opening: a condition that comes back later is another row.
alert = Table(
    "alert",
    metadata,
    id_column(),
    Column("rule_id", Uuid, nullable=False, comment="of a rule that may be gone since"),
    Column("kind", Text, nullable=False),
    Column("scope_kind", Text, nullable=False),
    Column("scope_id", Text, nullable=False),
    Column("subject", Text, nullable=False, comment="what in the scope it is about: a budget, a model, a currency"),
    Column("level", Integer, nullable=False, comment="how bad, from 0; of a share of a budget, which of the shares"),
    Column("summary", Text, nullable=False),
    Column("details", JSONB, nullable=False, comment="the figures behind the summary; amounts as strings"),
    Column("causes", JSONB, nullable=False, server_default=text("'[]'"), comment="who made the rise, and their shares"),
    Column("opened_at", Timestamp, nullable=False),
    Column("updated_at", Timestamp, nullable=False),
    Column("clear_since", Timestamp, nullable=True, comment="since when the condition is gone; NULL: it holds"),
    Column("resolved_at", Timestamp, nullable=True),
    Column("told_level", Integer, nullable=False, server_default=text("-1"), comment="last one sent; -1: none"),
    Index(
        "uq_alert_open",
        "rule_id",
        "scope_kind",
        "scope_id",
        "subject",
        unique=True,
        postgresql_where=text("resolved_at IS NULL"),
    ),
    Index(None, "opened_at"),
)

# The outbox. Its id goes with the message, so that a receiver can tell a repetition.
alert_delivery = Table(
    "alert_delivery",
    metadata,
    id_column(),
    Column("alert_id", ForeignKey("alert.id", ondelete="CASCADE"), nullable=True, comment="NULL: of a test"),
    Column("channel", ForeignKey("alert_channel.name", ondelete="CASCADE"), nullable=False),
    Column("message", JSONB, nullable=False),
    Column("status", Text, nullable=False, server_default="waiting"),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("due_at", Timestamp, nullable=False, server_default=func.now()),
    Column("error", Text, nullable=True, comment="why the last attempt failed"),
    created(),
    Column("ended_at", Timestamp, nullable=True, comment="sent, or given up"),
    CheckConstraint("status IN ('waiting', 'sent', 'dead')", name="status"),
    Index("ix_alert_delivery_waiting", "due_at", postgresql_where=text("status = 'waiting'")),
    Index(None, "alert_id"),
)

# What each gateway process says of itself now and then; rows of the last hours.
replica_health = Table(
    "replica_health",
    metadata,
    Column("replica", Text, primary_key=True, comment="place.run of the process's spool"),
    Column("at", Timestamp, primary_key=True, server_default=func.now()),
    Column("spooled", BigInteger, nullable=False, comment="operations that the ledger does not have yet"),
    Column("free_bytes", BigInteger, nullable=False, comment="room on the disk under the spool"),
)
