"""Keys with several secrets (rotation) and with restrictions.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "key_secret",
        sa.Column(
            "hash", sa.LargeBinary(), nullable=False, comment="SHA-256 of the secret; the secret itself is not kept"
        ),
        sa.Column("key_id", sa.Uuid(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "ends_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="When a newer secret has replaced it; NULL: the newest",
        ),
        sa.ForeignKeyConstraint(["key_id"], ["api_key.id"], name=op.f("fk_key_secret_key_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_key_secret")),
    )
    op.create_index(op.f("ix_key_secret_key_id"), "key_secret", ["key_id"])
    op.execute("INSERT INTO key_secret (hash, key_id, created_at) SELECT hash, id, created_at FROM api_key")
    op.drop_column("api_key", "hash")
    op.alter_column(
        "api_key",
        "prefix",
        comment="First characters of the newest secret, safe to show",
        existing_comment="First characters of the key, safe to show",
    )
    for name, kind, comment in (
        ("models", sa.Text(), "Names it may ask for; NULL: any"),
        ("routes", sa.Text(), "Interfaces it may use; NULL: any"),
        ("networks", postgresql.CIDR(), "Where it may be used from; NULL: anywhere"),
    ):
        op.add_column("api_key", sa.Column(name, sa.ARRAY(kind), nullable=True, comment=comment))
    op.add_column(
        "api_key",
        sa.Column(
            "tags",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
            comment="On every operation",
        ),
    )
    op.add_column("api_key", sa.Column("may_attribute", sa.Boolean(), server_default=sa.text("false"), nullable=False))


def downgrade() -> None:
    """Keep each key's newest secret: the schema before had room for one."""
    for name in ("may_attribute", "tags", "networks", "routes", "models"):
        op.drop_column("api_key", name)
    op.alter_column(
        "api_key",
        "prefix",
        comment="First characters of the key, safe to show",
        existing_comment="First characters of the newest secret, safe to show",
    )
    op.add_column(
        "api_key",
        sa.Column("hash", sa.LargeBinary(), nullable=True, comment="SHA-256 of the key; the key itself is not kept"),
    )
    op.execute("UPDATE api_key k SET hash = s.hash FROM key_secret s WHERE s.key_id = k.id AND s.ends_at IS NULL")
    op.alter_column("api_key", "hash", nullable=False)
    op.create_unique_constraint(op.f("uq_api_key_hash"), "api_key", ["hash"])
    op.drop_index(op.f("ix_key_secret_key_id"), table_name="key_secret")
    op.drop_table("key_secret")
