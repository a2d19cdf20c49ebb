"""Leases in place of holds, and limits beside budgets.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

WINDOWS = "('hour', 'day', 'week', 'month', 'none')"
KEY = "uq_budget_scope_kind_scope_id"


def upgrade() -> None:
    # A hold knows its operation, a lease does not: what calls of the old version hold now will not be settled by them.
    op.drop_table("hold")
    op.execute("UPDATE budget_window SET leased = 0 WHERE leased <> 0")
    op.add_column(
        "budget",
        sa.Column(
            "unit", sa.Text(), server_default="money", nullable=False, comment="money, requests, tokens or concurrent"
        ),
    )
    comment = "minute (of a limit), hour, day, week, month or none"
    op.alter_column("budget", "window", comment=comment, existing_comment="hour, day, week, month or none")
    op.alter_column("budget", "currency", nullable=True, comment="of money")
    op.drop_constraint(op.f(f"{KEY}_window"), "budget")
    op.create_unique_constraint(op.f(f"{KEY}_unit_window"), "budget", ["scope_kind", "scope_id", "unit", "window"])
    op.drop_constraint(op.f("ck_budget_window"), "budget")
    op.create_check_constraint(op.f("ck_budget_window"), "budget", f"\"window\" IN ('minute', {WINDOWS[1:]}")
    op.create_check_constraint(
        op.f("ck_budget_unit"), "budget", "unit IN ('money', 'requests', 'tokens', 'concurrent')"
    )
    op.create_check_constraint(
        op.f("ck_budget_money_has_a_currency"), "budget", "(unit = 'money') = (currency IS NOT NULL)"
    )
    op.create_table(
        "lease",
        sa.Column("budget_id", sa.Uuid(), nullable=False),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("replica", sa.Text(), nullable=False, comment="place.run of the process's spool"),
        sa.Column("granted", sa.Numeric(), nullable=False, comment="taken out and not given back"),
        sa.Column(
            "settled",
            sa.Numeric(),
            server_default=sa.text("0"),
            nullable=False,
            comment="of it, what the ledger has charged",
        ),
        sa.Column(
            "renewed_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="on a limit of calls at once",
        ),
        sa.CheckConstraint("settled >= 0", name=op.f("ck_lease_settled_not_negative")),
        sa.CheckConstraint("granted >= settled", name=op.f("ck_lease_settled_was_granted")),
        sa.ForeignKeyConstraint(
            ["budget_id", "starts_at"],
            ["budget_window.budget_id", "budget_window.starts_at"],
            name=op.f("fk_lease_budget_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("budget_id", "starts_at", "replica", name=op.f("pk_lease")),
    )
    op.create_index(op.f("ix_lease_replica"), "lease", ["replica"])
    op.create_table(
        "operation_set_aside",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operation_set_aside")),
    )


def downgrade() -> None:
    op.drop_table("operation_set_aside")
    op.drop_table("lease")
    op.execute("DELETE FROM budget WHERE unit <> 'money'")
    op.execute("UPDATE budget_window SET leased = 0 WHERE leased <> 0")
    op.drop_constraint(op.f("ck_budget_money_has_a_currency"), "budget")
    op.drop_constraint(op.f("ck_budget_unit"), "budget")
    op.drop_constraint(op.f("ck_budget_window"), "budget")
    op.create_check_constraint(op.f("ck_budget_window"), "budget", f'"window" IN {WINDOWS}')
    op.drop_constraint(op.f(f"{KEY}_unit_window"), "budget")
    op.create_unique_constraint(op.f(f"{KEY}_window"), "budget", ["scope_kind", "scope_id", "window"])
    op.alter_column("budget", "currency", nullable=False, comment=None)
    op.alter_column("budget", "window", comment="hour, day, week, month or none")
    op.drop_column("budget", "unit")
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
