"""The first schema: people, prices, budgets, and the ledger with its default partitions."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "attempt",
        sa.Column("operation_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("upstream", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("http_status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("input_fresh", sa.BigInteger(), nullable=False),
        sa.Column("input_cached", sa.BigInteger(), nullable=False),
        sa.Column("input_cache_write", sa.BigInteger(), nullable=False),
        sa.Column("output_text", sa.BigInteger(), nullable=False),
        sa.Column("output_reasoning", sa.BigInteger(), nullable=False),
        sa.Column("usage_source", sa.Text(), nullable=False),
        sa.Column("usage_flag", sa.Text(), nullable=True, comment="what was inconsistent in the reported usage"),
        sa.Column("generated_tokens", sa.BigInteger(), nullable=True),
        sa.Column("recomputed_tokens", sa.BigInteger(), nullable=True),
        sa.Column("prefill_device_seconds", sa.Double(), nullable=True),
        sa.Column("decode_device_seconds", sa.Double(), nullable=True),
        sa.Column("kv_block_seconds", sa.Double(), nullable=True),
        sa.Column("queue_seconds", sa.Double(), nullable=True),
        sa.Column("ttft_seconds", sa.Double(), nullable=True),
        sa.Column("total_seconds", sa.Double(), nullable=False),
        sa.Column("preemptions", sa.Integer(), nullable=True),
        sa.Column("price_version_id", sa.Uuid(), nullable=True),
        sa.Column("cost_version_id", sa.Uuid(), nullable=True),
        sa.Column("billed", sa.Numeric(), nullable=True),
        sa.Column("cost", sa.Numeric(), nullable=True),
        sa.CheckConstraint("input_cache_write >= 0", name=op.f("ck_attempt_input_cache_write_not_negative")),
        sa.CheckConstraint("input_cached >= 0", name=op.f("ck_attempt_input_cached_not_negative")),
        sa.CheckConstraint("input_fresh >= 0", name=op.f("ck_attempt_input_fresh_not_negative")),
        sa.CheckConstraint("output_reasoning >= 0", name=op.f("ck_attempt_output_reasoning_not_negative")),
        sa.CheckConstraint("output_text >= 0", name=op.f("ck_attempt_output_text_not_negative")),
        sa.PrimaryKeyConstraint("operation_id", "number", name=op.f("pk_attempt")),
        postgresql_partition_by="RANGE (operation_id)",
    )
    op.create_table(
        "budget",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("scope_kind", sa.Text(), nullable=False),
        sa.Column("scope_id", sa.Text(), nullable=False),
        sa.Column("window", sa.Text(), nullable=False, comment="hour, day, week, month or none"),
        sa.Column("time_zone", sa.Text(), server_default="UTC", nullable=False),
        sa.Column("limit_amount", sa.Numeric(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("hard", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "scope_kind IN ('org', 'team', 'user', 'key', 'tag', 'model')", name=op.f("ck_budget_scope_kind")
        ),
        sa.CheckConstraint("\"window\" IN ('hour', 'day', 'week', 'month', 'none')", name=op.f("ck_budget_window")),
        sa.CheckConstraint("limit_amount >= 0", name=op.f("ck_budget_limit_not_negative")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budget")),
        sa.UniqueConstraint("scope_kind", "scope_id", "window", name=op.f("uq_budget_scope_kind_scope_id_window")),
    )
    op.create_table(
        "operation",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("org_id", sa.Uuid(), nullable=False),
        sa.Column("team_id", sa.Uuid(), nullable=True),
        sa.Column("user_id", sa.Uuid(), nullable=True),
        sa.Column("key_id", sa.Uuid(), nullable=False),
        sa.Column("tags", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("api", sa.Text(), nullable=False),
        sa.Column("requested_model", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("route_reasons", sa.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("route_score", sa.Double(), nullable=True),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("http_status", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("ttft_seconds", sa.Double(), nullable=True),
        sa.Column("total_seconds", sa.Double(), nullable=False),
        sa.Column("billed", sa.Numeric(), nullable=True),
        sa.Column("cost", sa.Numeric(), nullable=True),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operation")),
        postgresql_partition_by="RANGE (id)",
    )
    op.create_index(op.f("ix_operation_key_id_started_at"), "operation", ["key_id", "started_at"], unique=False)
    op.create_index(op.f("ix_operation_started_at"), "operation", ["started_at"], unique=False)
    op.create_index(op.f("ix_operation_user_id_started_at"), "operation", ["user_id", "started_at"], unique=False)
    op.create_table(
        "org",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_org")),
        sa.UniqueConstraint("name", name=op.f("uq_org_name")),
    )
    op.create_table(
        "price_version",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column(
            "book", sa.Text(), nullable=False, comment="sale: what the user is billed; cost: what the operator pays"
        ),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("upstream", sa.Text(), server_default="", nullable=False, comment="empty on a sale price"),
        sa.Column("effective_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("input_fresh", sa.Numeric(), nullable=True, comment="per million tokens"),
        sa.Column("input_cached", sa.Numeric(), nullable=True, comment="per million tokens"),
        sa.Column("input_cache_write", sa.Numeric(), nullable=True, comment="per million tokens"),
        sa.Column("output_text", sa.Numeric(), nullable=True, comment="per million tokens"),
        sa.Column("output_reasoning", sa.Numeric(), nullable=True, comment="per million tokens"),
        sa.Column(
            "device_hour",
            sa.Numeric(),
            nullable=True,
            comment="price of one device for an hour, on a cost by device time",
        ),
        sa.CheckConstraint("book IN ('sale', 'cost')", name=op.f("ck_price_version_book")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_price_version")),
        sa.UniqueConstraint(
            "book", "model", "upstream", "effective_at", name=op.f("uq_price_version_book_model_upstream_effective_at")
        ),
    )
    op.create_table(
        "budget_window",
        sa.Column("budget_id", sa.Uuid(), nullable=False),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("leased", sa.Numeric(), server_default=sa.text("0"), nullable=False),
        sa.Column("settled", sa.Numeric(), server_default=sa.text("0"), nullable=False),
        sa.CheckConstraint("leased >= 0", name=op.f("ck_budget_window_leased_not_negative")),
        sa.CheckConstraint("settled >= 0", name=op.f("ck_budget_window_settled_not_negative")),
        sa.ForeignKeyConstraint(
            ["budget_id"], ["budget.id"], name=op.f("fk_budget_window_budget_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("budget_id", "starts_at", name=op.f("pk_budget_window")),
    )
    op.create_table(
        "hold",
        sa.Column("operation_id", sa.Uuid(), nullable=False),
        sa.Column("budget_id", sa.Uuid(), nullable=False),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("amount", sa.Numeric(), nullable=False),
        sa.Column("replica", sa.Text(), nullable=False, comment="Which gateway process took it"),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("amount >= 0", name=op.f("ck_hold_amount_not_negative")),
        sa.ForeignKeyConstraint(["budget_id"], ["budget.id"], name=op.f("fk_hold_budget_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("operation_id", "budget_id", name=op.f("pk_hold")),
    )
    op.create_table(
        "team",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("org_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["org.id"], name=op.f("fk_team_org_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_team")),
        sa.UniqueConstraint("org_id", "name", name=op.f("uq_team_org_id_name")),
    )
    op.create_table(
        "app_user",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("org_id", sa.Uuid(), nullable=False),
        sa.Column("team_id", sa.Uuid(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["org_id"], ["org.id"], name=op.f("fk_app_user_org_id")),
        sa.ForeignKeyConstraint(["team_id"], ["team.id"], name=op.f("fk_app_user_team_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_app_user")),
        sa.UniqueConstraint("org_id", "name", name=op.f("uq_app_user_org_id_name")),
    )
    op.create_table(
        "api_key",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("org_id", sa.Uuid(), nullable=False),
        sa.Column("team_id", sa.Uuid(), nullable=True),
        sa.Column("user_id", sa.Uuid(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False, comment="First characters of the key, safe to show"),
        sa.Column("hash", sa.LargeBinary(), nullable=False, comment="SHA-256 of the key; the key itself is not kept"),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["org_id"], ["org.id"], name=op.f("fk_api_key_org_id")),
        sa.ForeignKeyConstraint(["team_id"], ["team.id"], name=op.f("fk_api_key_team_id")),
        sa.ForeignKeyConstraint(["user_id"], ["app_user.id"], name=op.f("fk_api_key_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_key")),
        sa.UniqueConstraint("hash", name=op.f("uq_api_key_hash")),
    )
    for table in ("operation", "attempt"):
        op.execute(f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT")


def downgrade() -> None:
    op.drop_table("api_key")
    op.drop_table("app_user")
    op.drop_table("team")
    op.drop_table("hold")
    op.drop_table("budget_window")
    op.drop_table("price_version")
    op.drop_table("org")
    op.drop_index(op.f("ix_operation_user_id_started_at"), table_name="operation")
    op.drop_index(op.f("ix_operation_started_at"), table_name="operation")
    op.drop_index(op.f("ix_operation_key_id_started_at"), table_name="operation")
    op.drop_table("operation")
    op.drop_table("budget")
    op.drop_table("attempt")
