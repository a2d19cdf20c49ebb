"""Budgets: wallets, rollover."""

from collections.abc import Sequence

revision = "0007"
down_revision = "0006"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
