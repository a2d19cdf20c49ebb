"""Defaults for the sums that 0013 added: a gateway of an earlier version, still running, writes rows without them.

Revision ID: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

ROLLUPS = ("usage_hour", "usage_day", "usage_hour_tag", "usage_day_tag")
ADDED = (
    *("cached_answers", "saved_prompt_tokens", "saved_completion_tokens"),
    *("cached_answers_saved", "cached_answers_saved_unknown"),
)


def upgrade() -> None:
    for table in ROLLUPS:
        for name in ADDED:
            op.alter_column(table, name, server_default=sa.text("0"))


def downgrade() -> None:
    for table in ROLLUPS:
        for name in ADDED:
            op.alter_column(table, name, server_default=None)
