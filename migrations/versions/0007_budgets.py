"""Budgets of several scopes together, rollover, prepaid wallets, and a sign of life of each replica.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

KEY = "uq_budget_scope_kind_scope_id"

_REFUSE = """
CREATE FUNCTION farthing_wallet_entry_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the entries of wallets are only ever added to' USING ERRCODE = 'insufficient_privilege';
END $$
"""


def upgrade() -> None:
    _budgets()
    _wallets()
    op.create_table(
        "replica",
        sa.Column("name", sa.Text(), nullable=False, comment="place.run of the process's spool"),
        _created(),
        sa.Column(
            "renewed_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="when it last said it lives",
        ),
        sa.Column(
            "freed_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="when it was taken for dead, and has not heard of it yet",
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_replica")),
    )
    op.execute("INSERT INTO replica (name, renewed_at) SELECT replica, max(renewed_at) FROM lease GROUP BY replica")
    op.drop_column("lease", "renewed_at")


def _budgets() -> None:
    op.add_column(
        "budget",
        sa.Column(
            "also",
            postgresql.JSONB(),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="other scopes that a call must have too, kind: id; the scope itself is the narrowest",
        ),
    )
    op.add_column(
        "budget",
        sa.Column(
            "rolls_since",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="the first window whose rest adds to the next; NULL: none",
        ),
    )
    op.add_column(
        "budget",
        sa.Column(
            "rollover_cap",
            sa.Numeric(),
            nullable=True,
            comment="the most that is carried into a window; NULL: no cap",
        ),
    )
    op.add_column(
        "budget",
        sa.Column("prepaid", sa.Boolean(), server_default=sa.text("false"), nullable=False, comment="a wallet"),
    )
    op.drop_constraint(op.f(f"{KEY}_unit_window"), "budget")
    op.create_unique_constraint(
        op.f(f"{KEY}_also_unit_window_prepaid"),
        "budget",
        ["scope_kind", "scope_id", "also", "unit", "window", "prepaid"],
    )
    for name, rule in {
        "money_rolls_over": "rolls_since IS NULL OR unit = 'money' AND \"window\" <> 'none'",
        "rollover_cap": "rollover_cap IS NULL OR rollover_cap >= 0 AND rolls_since IS NOT NULL",
        "a_wallet_is_money": ("NOT prepaid OR unit = 'money' AND \"window\" = 'none' AND hard AND limit_amount = 0"),
    }.items():
        op.create_check_constraint(op.f(f"ck_budget_{name}"), "budget", rule)
    op.add_column(
        "budget_window",
        sa.Column(
            "added",
            sa.Numeric(),
            server_default=sa.text("0"),
            nullable=False,
            comment="on top of the limit: what rolled over into it, or the credit of a wallet",
        ),
    )
    op.add_column(
        "budget_window",
        sa.Column(
            "limit_amount", sa.Numeric(), nullable=True, comment="of a budget that rolls over: its limit in this window"
        ),
    )
    op.create_check_constraint(op.f("ck_budget_window_added_not_negative"), "budget_window", "added >= 0")


def _wallets() -> None:
    op.create_table(
        "wallet_credit",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("wallet_id", sa.Uuid(), nullable=False),
        sa.Column("rest", sa.Numeric(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("rest >= 0", name=op.f("ck_wallet_credit_rest_not_negative")),
        sa.ForeignKeyConstraint(["wallet_id"], ["budget.id"], name=op.f("fk_wallet_credit_wallet_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_wallet_credit")),
    )
    op.create_index(
        "ix_wallet_credit_open", "wallet_credit", ["wallet_id", "expires_at"], postgresql_where=sa.text("rest > 0")
    )
    op.create_table(
        "wallet_entry",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("wallet_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("amount", sa.Numeric(), nullable=False, comment="added to the balance; what is taken is below 0"),
        sa.Column(
            "credit_id",
            sa.Uuid(),
            nullable=True,
            comment="of which top-up; NULL: of none, the wallet had nothing left",
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True, comment="of a top-up"),
        sa.Column(
            "uncollected",
            sa.Numeric(),
            server_default=sa.text("0"),
            nullable=False,
            comment="of a capture: charged and not there to be taken",
        ),
        sa.Column("note", sa.Text(), nullable=True),
        sa.Column("actor", sa.Text(), nullable=True, comment="who made it; NULL: the ledger"),
        _created(),
        sa.CheckConstraint(
            "kind IN ('top_up', 'capture', 'expiry', 'refund', 'adjustment')", name=op.f("ck_wallet_entry_kind")
        ),
        sa.CheckConstraint(
            "CASE WHEN kind IN ('top_up', 'refund') THEN amount > 0 WHEN kind = 'adjustment' THEN amount <> 0"
            " ELSE amount <= 0 END",
            name=op.f("ck_wallet_entry_sign"),
        ),
        sa.ForeignKeyConstraint(["wallet_id"], ["budget.id"], name=op.f("fk_wallet_entry_wallet_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_wallet_entry")),
    )
    op.create_index(op.f("ix_wallet_entry_wallet_id_id"), "wallet_entry", ["wallet_id", "id"])
    op.execute(_REFUSE)
    op.execute(
        "CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON wallet_entry "
        "FOR EACH STATEMENT EXECUTE FUNCTION farthing_wallet_entry_refuse()"
    )


def _created() -> sa.Column[object]:
    return sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False)


def downgrade() -> None:
    # The old version knows no budget of several scopes and no wallet: it would read them as something else.
    op.drop_table("wallet_entry")
    op.execute("DROP FUNCTION farthing_wallet_entry_refuse()")
    op.drop_table("wallet_credit")
    op.execute("DELETE FROM budget WHERE also <> '{}' OR prepaid")
    op.add_column(
        "lease",
        sa.Column(
            "renewed_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="on a limit of calls at once",
        ),
    )
    op.execute("UPDATE lease SET renewed_at = r.renewed_at FROM replica r WHERE r.name = lease.replica")
    op.drop_table("replica")
    op.drop_column("budget_window", "limit_amount")
    op.drop_column("budget_window", "added")
    for name in ("money_rolls_over", "rollover_cap", "a_wallet_is_money"):
        op.drop_constraint(op.f(f"ck_budget_{name}"), "budget")
    op.drop_constraint(op.f(f"{KEY}_also_unit_window_prepaid"), "budget")
    op.create_unique_constraint(op.f(f"{KEY}_unit_window"), "budget", ["scope_kind", "scope_id", "unit", "window"])
    for name in ("prepaid", "rollover_cap", "rolls_since", "also"):
        op.drop_column("budget", name)
