"""Wallets that are closed: their account stays, and calls are not paid from them any more.

Revision ID: 0012
Revises: 0011
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "budget",
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True, comment="of a wallet; NULL: it is open"),
    )
    op.create_check_constraint(op.f("ck_budget_wallets_are_closed"), "budget", "closed_at IS NULL OR prepaid")


def downgrade() -> None:
    # The version before knows only open wallets, and would refuse every call of one that is empty: no call has this
    # tag. The account stays.
    op.execute("""
        UPDATE budget SET scope_kind = 'tag', scope_id = 'closed wallet=' || id::text, also = '{}'
        WHERE closed_at IS NOT NULL
    """)
    op.drop_constraint(op.f("ck_budget_wallets_are_closed"), "budget")
    op.drop_column("budget", "closed_at")
