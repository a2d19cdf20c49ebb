"""Answers from the response cache: where each came from, what it saved, what it is billed.

Revision ID: 0013
Revises: 0012
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

ROLLUPS = ("usage_hour", "usage_day", "usage_hour_tag", "usage_day_tag")
COUNTS = ("cached_answers", "saved_prompt_tokens", "saved_completion_tokens", "cached_answers_saved_unknown")
AMOUNTS = ("cached_answers_saved",)


def upgrade() -> None:
    # No value is written into a row: all of this is quick on any table.
    for name, kind, comment in (
        ("cached_from", sa.Uuid(), "the operation that the cached answer was made for"),
        ("saved_prompt_tokens", sa.BigInteger(), "of that operation"),
        ("saved_completion_tokens", sa.BigInteger(), "of that operation"),
        ("saved_billed", sa.Numeric(), "what that operation was billed"),
        ("saved_cost", sa.Numeric(), "what that operation cost"),
        ("price_version_id", sa.Uuid(), "what the cached answer was charged with"),
        ("price_override_id", sa.Uuid(), "likewise"),
    ):
        op.add_column("operation", sa.Column(name, kind, nullable=True, comment=comment))
    op.add_column(
        "price_version",
        sa.Column(
            "per_cached_answer", sa.Numeric(), nullable=True, comment="for each from the response cache; NULL: nothing"
        ),
    )
    for table in ROLLUPS:
        for name in (*COUNTS, *AMOUNTS):
            kind = sa.BigInteger() if name in COUNTS else sa.Numeric()
            # What there is has none; what is added says how many.
            op.add_column(table, sa.Column(name, kind, nullable=False, server_default=sa.text("0")))
            op.alter_column(table, name, server_default=None)


def downgrade() -> None:
    for table in ROLLUPS:
        for name in (*AMOUNTS, *COUNTS):
            op.drop_column(table, name)
    op.drop_column("price_version", "per_cached_answer")
    for name in (
        *("price_override_id", "price_version_id", "saved_cost", "saved_billed"),
        *("saved_completion_tokens", "saved_prompt_tokens", "cached_from"),
    ):
        op.drop_column("operation", name)
