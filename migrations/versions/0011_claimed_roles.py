"""Whether a provider's claim gave an administrator's role; no TRUNCATE past the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_AUDITED = (
    "org", "team", "app_user", "api_key", "budget", "price_version", "alert_rule", "alert_channel", "alert_silence",
    "administrator", "admin_token", "invoice",
)  # fmt: skip

_REFUSE = """
CREATE FUNCTION farthing_refuse_truncate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'TRUNCATE would leave no trace in the audit log: use DELETE'
        USING ERRCODE = 'insufficient_privilege';
END $$
"""


def upgrade() -> None:
    op.add_column(
        "administrator",
        sa.Column(
            "role_claimed",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
            comment="a provider's claim gave it",
        ),
    )
    op.execute(_REFUSE)
    for table in _AUDITED:
        op.execute(
            f"CREATE TRIGGER farthing_no_truncate BEFORE TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION farthing_refuse_truncate()"
        )


def downgrade() -> None:
    for table in _AUDITED:
        op.execute(f"DROP TRIGGER farthing_no_truncate ON {table}")
    op.execute("DROP FUNCTION farthing_refuse_truncate()")
    op.drop_column("administrator", "role_claimed")
