"""Prices: overrides, tiers, parts per request and image; adjustments; hours of devices."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

KEY = ["book", "model", "upstream", "tier", "effective_at"]
NOW = sa.text("now()")
REFUSE = """
CREATE FUNCTION farthing_adjustment_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'adjustments are only added to: correct the price and re-rate once more';
END $$
"""


def upgrade() -> None:
    _widen_price_version()
    # Constant defaults: no row of the ledger is written.
    op.add_column("attempt", sa.Column("tier", sa.Text(), server_default="standard", nullable=False))
    op.add_column("attempt", sa.Column("images", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.add_column("attempt", sa.Column("billable", sa.Boolean(), server_default=sa.text("true"), nullable=False))
    op.add_column("attempt", sa.Column("price_override_id", sa.Uuid(), nullable=True))
    ends = [f"{name}_{end}" for name in ("price_version", "override", "cost_version") for end in ("from", "to")]
    op.create_table(
        "adjustment",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("operation_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, comment="of the attempt"),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False, comment="of the operation"),
        sa.Column("made_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column(
            "billed_delta",
            sa.Numeric(),
            nullable=True,
            comment="NULL: no change; what was unknown before counts as 0",
        ),
        sa.Column("cost_delta", sa.Numeric(), nullable=True, comment="likewise"),
        *(sa.Column(name, sa.Uuid(), nullable=True) for name in ends),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.CheckConstraint(
            "billed_delta IS NOT NULL OR cost_delta IS NOT NULL", name=op.f("ck_adjustment_changes_something")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adjustment")),
    )
    op.create_index(op.f("ix_adjustment_operation_id_number"), "adjustment", ["operation_id", "number"])
    op.create_index(op.f("ix_adjustment_started_at"), "adjustment", ["started_at"])
    op.execute(REFUSE)
    op.execute(
        "CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON adjustment "
        "FOR EACH STATEMENT EXECUTE FUNCTION farthing_adjustment_refuse()"
    )
    op.create_table(
        "device_hour",
        sa.Column("upstream", sa.Text(), nullable=False),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=False, comment="of a UTC hour"),
        sa.Column("currency", sa.Text(), nullable=False),
        *(sa.Column(f"{name}_seconds", sa.Numeric(), nullable=False) for name in ("wall", "busy", "idle")),
        sa.Column("busy_cost", sa.Numeric(), nullable=True, comment="NULL: some of it had no price"),
        sa.Column("idle_cost", sa.Numeric(), nullable=True, comment="likewise"),
        sa.CheckConstraint("busy_seconds >= 0 AND idle_seconds >= 0", name=op.f("ck_device_hour_seconds_not_negative")),
        sa.PrimaryKeyConstraint("upstream", "starts_at", "currency", name=op.f("pk_device_hour")),
    )
    op.create_table(
        "device_account",
        sa.Column("instance", sa.Text(), nullable=False, comment="another one after each start of the engine"),
        sa.Column("upstream", sa.Text(), nullable=False, comment="the one it counts for, where two lead to it"),
        sa.Column("wall_seconds", sa.Numeric(), server_default=sa.text("0"), nullable=False),
        sa.Column("idle_seconds", sa.Numeric(), server_default=sa.text("0"), nullable=False),
        sa.Column("read_at", sa.DateTime(timezone=True), server_default=NOW, nullable=False),
        sa.PrimaryKeyConstraint("instance", name=op.f("pk_device_account")),
    )


def _widen_price_version() -> None:
    table = "price_version"
    comment = "whose override it is; empty: list price"
    op.add_column(table, sa.Column("scope_kind", sa.Text(), server_default="", nullable=False, comment=comment))
    op.add_column(table, sa.Column("scope_id", sa.Text(), server_default="", nullable=False))
    for name, comment in (
        ("per_request", "for each answered attempt; NULL: no such part"),
        ("per_image", "for each image of the prompt; NULL: no such part"),
        ("factor", "an override: times the list price"),
    ):
        op.add_column(table, sa.Column(name, sa.Numeric(), nullable=True, comment=comment))
    comment = "who entered it"
    op.add_column(
        table, sa.Column("source", sa.Text(), server_default="configuration", nullable=False, comment=comment)
    )
    op.alter_column(table, "model", comment="empty: every model, of an override; or a device's price")
    op.alter_column(table, "tier", comment="empty: every tier, of an override")
    op.drop_constraint(op.f("uq_price_version_book_model_upstream_tier_effective_at"), table)
    op.create_index(op.f("ix_price_version_book_model_upstream_tier_effective_at"), table, KEY)
    op.drop_constraint(op.f("ck_price_version_tier"), table)
    for name, check in (
        ("tier", "tier IN ('', 'standard', 'batch', 'priority')"),
        ("scope_kind", "scope_kind IN ('', 'org', 'team', 'key')"),
        ("scope_is_whole", "(scope_kind = '') = (scope_id = '')"),
        ("factor_of_an_override", "factor IS NULL OR scope_kind <> ''"),
        ("source", "source IN ('configuration', 'operator')"),
    ):
        op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, check)


def downgrade() -> None:
    """Overrides, priority prices and corrections have no place in the schema before: they go."""
    for name in ("device_account", "device_hour", "adjustment"):
        op.drop_table(name)
    op.execute("DROP FUNCTION farthing_adjustment_refuse()")
    for name in ("price_override_id", "billable", "images", "tier"):
        op.drop_column("attempt", name)
    table = "price_version"
    op.execute("DELETE FROM price_version WHERE scope_kind <> '' OR tier NOT IN ('standard', 'batch')")
    op.execute(
        "DELETE FROM price_version old USING price_version new WHERE new.id > old.id AND "  # noqa: S608
        + " AND ".join(f"new.{name} = old.{name}" for name in KEY)
    )
    for name in ("source", "factor_of_an_override", "scope_is_whole", "scope_kind", "tier"):
        op.drop_constraint(op.f(f"ck_{table}_{name}"), table)
    op.create_check_constraint(op.f(f"ck_{table}_tier"), table, "tier IN ('standard', 'batch')")
    op.drop_index(op.f("ix_price_version_book_model_upstream_tier_effective_at"), table)
    op.create_unique_constraint(op.f("uq_price_version_book_model_upstream_tier_effective_at"), table, KEY)
    for name in ("source", "factor", "per_image", "per_request", "scope_id", "scope_kind"):
        op.drop_column(table, name)
    op.alter_column(table, "tier", comment="standard, or batch for a batch's lines")
    op.alter_column(table, "model", comment=None)
