"""Alerts, with the three rules that every installation starts with."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from billing.ids import new_id

revision = "0008"
down_revision = "0007"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_FIRST_RULES = ("budget_share", "unpriced_model", "spool")
_SCOPES = "('all', 'org', 'team', 'user', 'key', 'tag', 'model')"


def upgrade() -> None:
    _rules()
    _channels()
    _silences()
    _alerts()
    _deliveries()
    op.create_table(
        "replica_health",
        sa.Column("replica", sa.Text(), nullable=False, comment="place.run of the process's spool"),
        _time("at", default=True),
        sa.Column("spooled", sa.BigInteger(), nullable=False, comment="operations that the ledger does not have yet"),
        sa.Column("free_bytes", sa.BigInteger(), nullable=False, comment="room on the disk under the spool"),
        sa.PrimaryKeyConstraint("replica", "at", name=op.f("pk_replica_health")),
    )


def _rules() -> None:
    none, yes = sa.text("'{}'"), sa.text("true")
    comment = "as a budget's; * for each of the kind; empty for all"
    rule = op.create_table(
        "alert_rule",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("scope_kind", sa.Text(), nullable=False),
        sa.Column("scope_id", sa.Text(), nullable=False, comment=comment),
        _json("parameters", none, "those that are not the default"),
        sa.Column("channels", sa.ARRAY(sa.Text()), nullable=True, comment="names; NULL: every channel"),
        sa.Column("enabled", sa.Boolean(), server_default=yes, nullable=False),
        _time("created_at", default=True),
        sa.CheckConstraint(f"scope_kind IN {_SCOPES}", name=op.f("ck_alert_rule_scope_kind")),
        sa.CheckConstraint("(scope_kind = 'all') = (scope_id = '')", name=op.f("ck_alert_rule_all_has_no_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_rule")),
        sa.UniqueConstraint("kind", "scope_kind", "scope_id", name=op.f("uq_alert_rule_kind_scope_kind_scope_id")),
    )
    first = [{"id": new_id(), "kind": kind, "scope_kind": "all", "scope_id": ""} for kind in _FIRST_RULES]
    op.bulk_insert(rule, first)


def _channels() -> None:
    address = "where the URL is read: env:NAME or file:/PATH; never the URL"
    op.create_table(
        "alert_channel",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False, comment=address),
        sa.Column("secret", sa.Text(), nullable=True, comment="where the signing secret is read, likewise"),
        sa.Column("sender", sa.Text(), nullable=True, comment="of e-mail"),
        sa.Column("recipients", sa.ARRAY(sa.Text()), nullable=True, comment="of e-mail"),
        _time("created_at", default=True),
        sa.CheckConstraint(
            "kind IN ('webhook', 'slack', 'feishu', 'dingtalk', 'wecom', 'email')", name=op.f("ck_alert_channel_kind")
        ),
        sa.CheckConstraint("address ~ '^(env|file):'", name=op.f("ck_alert_channel_address_is_a_reference")),
        sa.CheckConstraint("secret ~ '^(env|file):'", name=op.f("ck_alert_channel_secret_is_a_reference")),
        sa.CheckConstraint(
            "(kind = 'email') = (recipients IS NOT NULL)", name=op.f("ck_alert_channel_email_has_recipients")
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_alert_channel")),
    )


def _silences() -> None:
    op.create_table(
        "alert_silence",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("rule_id", sa.Uuid(), nullable=True, comment="NULL: every rule"),
        sa.Column("scope_kind", sa.Text(), nullable=True, comment="NULL: every scope"),
        sa.Column("scope_id", sa.Text(), nullable=True),
        _time("until"),
        sa.Column("reason", sa.Text(), nullable=False),
        _time("created_at", default=True),
        sa.CheckConstraint("(scope_kind IS NULL) = (scope_id IS NULL)", name=op.f("ck_alert_silence_scope_is_whole")),
        sa.ForeignKeyConstraint(
            ["rule_id"], ["alert_rule.id"], name=op.f("fk_alert_silence_rule_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_silence")),
    )


def _alerts() -> None:
    level = "how bad, from 0; of a share of a budget, which of the shares"
    subject = "what in the scope it is about: a budget, a model, a currency"
    unsent = sa.text("-1")
    op.create_table(
        "alert",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("rule_id", sa.Uuid(), nullable=False, comment="of a rule that may be gone since"),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("scope_kind", sa.Text(), nullable=False),
        sa.Column("scope_id", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False, comment=subject),
        sa.Column("level", sa.Integer(), nullable=False, comment=level),
        sa.Column("summary", sa.Text(), nullable=False),
        _json("details", None, "the figures behind the summary; amounts as strings"),
        _json("causes", sa.text("'[]'"), "who made the rise, and their shares"),
        _time("opened_at"),
        _time("updated_at"),
        _time("clear_since", nullable=True, comment="since when the condition is gone; NULL: it holds"),
        _time("resolved_at", nullable=True),
        sa.Column("told_level", sa.Integer(), server_default=unsent, nullable=False, comment="last one sent; -1: none"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert")),
    )
    is_open = sa.text("resolved_at IS NULL")
    which = ["rule_id", "scope_kind", "scope_id", "subject"]
    op.create_index("uq_alert_open", "alert", which, unique=True, postgresql_where=is_open)
    op.create_index(op.f("ix_alert_opened_at"), "alert", ["opened_at"])


def _deliveries() -> None:
    nothing = sa.text("0")
    op.create_table(
        "alert_delivery",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("alert_id", sa.Uuid(), nullable=True, comment="NULL: of a test"),
        sa.Column("channel", sa.Text(), nullable=False),
        _json("message", None, None),
        sa.Column("status", sa.Text(), server_default="waiting", nullable=False),
        sa.Column("attempts", sa.Integer(), server_default=nothing, nullable=False),
        _time("due_at", default=True),
        sa.Column("error", sa.Text(), nullable=True, comment="why the last attempt failed"),
        _time("created_at", default=True),
        _time("ended_at", nullable=True, comment="sent, or given up"),
        sa.CheckConstraint("status IN ('waiting', 'sent', 'dead')", name=op.f("ck_alert_delivery_status")),
        sa.ForeignKeyConstraint(
            ["alert_id"], ["alert.id"], name=op.f("fk_alert_delivery_alert_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["channel"], ["alert_channel.name"], name=op.f("fk_alert_delivery_channel"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_delivery")),
    )
    waiting = sa.text("status = 'waiting'")
    op.create_index("ix_alert_delivery_waiting", "alert_delivery", ["due_at"], postgresql_where=waiting)
    op.create_index(op.f("ix_alert_delivery_alert_id"), "alert_delivery", ["alert_id"])


def _json(name: str, default: sa.TextClause | None, comment: str | None) -> sa.Column[object]:
    return sa.Column(name, postgresql.JSONB(), server_default=default, nullable=False, comment=comment)


def _time(name: str, *, nullable: bool = False, default: bool = False, comment: str | None = None) -> sa.Column[object]:
    now = sa.text("now()") if default else None
    return sa.Column(name, sa.DateTime(timezone=True), server_default=now, nullable=nullable, comment=comment)


def downgrade() -> None:
    for table in ("replica_health", "alert_delivery", "alert", "alert_silence", "alert_channel", "alert_rule"):
        op.drop_table(table)
