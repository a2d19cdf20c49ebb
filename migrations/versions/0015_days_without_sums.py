"""The days of the ledger whose sums are dropped too: nothing else tells of them, and reports say what they lack.

Revision ID: 0015
Revises: 0014
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage_dropped",
        sa.Column("day", sa.Date(), nullable=False, comment="of the ledger, UTC"),
        sa.PrimaryKeyConstraint("day", name=op.f("pk_usage_dropped")),
    )


def downgrade() -> None:
    op.drop_table("usage_dropped")
