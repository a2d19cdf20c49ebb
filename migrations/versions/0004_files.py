"""Files and batches of OpenAI's API, and prices for the lines of a batch."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_COUNTS = ("total", "completed", "failed")
_USAGE = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_OLD_PRICE_KEY = "uq_price_version_book_model_upstream_effective_at"
_NEW_PRICE_KEY = "uq_price_version_book_model_upstream_tier_effective_at"


def upgrade() -> None:
    _tier_of_prices()
    _files()
    _batches()


def _tier_of_prices() -> None:
    comment = "standard, or batch for a batch's lines"
    tier = sa.Column("tier", sa.Text(), server_default="standard", nullable=False, comment=comment)
    op.add_column("price_version", tier)
    op.create_check_constraint(op.f("ck_price_version_tier"), "price_version", "tier IN ('standard', 'batch')")
    op.drop_constraint(op.f(_OLD_PRICE_KEY), "price_version", type_="unique")
    key = ["book", "model", "upstream", "tier", "effective_at"]
    op.create_unique_constraint(op.f(_NEW_PRICE_KEY), "price_version", key)


def _files() -> None:
    op.create_table(
        "file",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("org_id", sa.Uuid(), nullable=False),
        sa.Column("key_id", sa.Uuid(), nullable=False, comment="who uploaded it, or whose batch wrote it"),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=True, comment="NULL until all of it is here"),
        _time("created_at", default=True),
        _time("expires_at", comment="deleted from then on; a DELETE sets it to now"),
        sa.CheckConstraint("purpose IN ('batch', 'batch_output')", name=op.f("ck_file_purpose")),
        sa.ForeignKeyConstraint(["org_id"], ["org.id"], name=op.f("fk_file_org_id")),
        sa.ForeignKeyConstraint(["key_id"], ["api_key.id"], name=op.f("fk_file_key_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_file")),
    )
    op.create_index(op.f("ix_file_org_id_id"), "file", ["org_id", "id"])
    op.create_index(op.f("ix_file_expires_at"), "file", ["expires_at"])
    comment = "1 MiB, the last one less; stored uncompressed, read in parts"
    op.create_table(
        "file_chunk",
        sa.Column("file_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False, comment=comment),
        sa.ForeignKeyConstraint(["file_id"], ["file.id"], name=op.f("fk_file_chunk_file_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("file_id", "number", name=op.f("pk_file_chunk")),
    )
    # A line of a batch is a few kilobytes of a chunk: of an uncompressed value only those are read from the disk.
    op.execute("ALTER TABLE file_chunk ALTER COLUMN data SET STORAGE EXTERNAL")


def _batches() -> None:
    op.create_table(
        "batch",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("org_id", sa.Uuid(), nullable=False),
        sa.Column("key_id", sa.Uuid(), nullable=False, comment="on whose behalf its lines run"),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("input_file_id", sa.Uuid(), nullable=False, comment="of a file that may have expired since"),
        sa.Column("metadata", postgresql.JSONB(), nullable=True),
        sa.Column("output_seconds", sa.Integer(), nullable=False, comment="how long its output files are kept"),
        sa.Column("status", sa.Text(), server_default="validating", nullable=False),
        sa.Column("errors", postgresql.JSONB(), nullable=True, comment="what is wrong with the input file"),
        sa.Column("model", sa.Text(), nullable=True, comment="NULL where its lines name different ones"),
        sa.Column("output_file_id", sa.Uuid(), nullable=True),
        sa.Column("error_file_id", sa.Uuid(), nullable=True),
        *(sa.Column(name, sa.Integer(), server_default=sa.text("0"), nullable=False) for name in _COUNTS),
        *(sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False) for name in _USAGE),
        _time("created_at", default=True),
        _time("expires_at"),
        *(_time(f"{name}_at", nullable=True) for name in _MOMENTS),
        _time("paused_until", default=True, comment="no line starts before"),
        sa.Column(
            "pauses", sa.Integer(), server_default=sa.text("0"), nullable=False, comment="since a line last finished"
        ),
        sa.Column("claimed_by", sa.Uuid(), nullable=True, comment="the gateway process that validates or finalizes it"),
        _time("claimed_until", default=True),
        sa.CheckConstraint(
            "status IN ('validating', 'in_progress', 'finalizing', 'cancelling', "
            "'failed', 'completed', 'expired', 'cancelled')",
            name=op.f("ck_batch_status"),
        ),
        sa.ForeignKeyConstraint(["org_id"], ["org.id"], name=op.f("fk_batch_org_id")),
        sa.ForeignKeyConstraint(["key_id"], ["api_key.id"], name=op.f("fk_batch_key_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batch")),
    )
    op.create_index(op.f("ix_batch_org_id_id"), "batch", ["org_id", "id"])
    is_open = sa.text("status IN ('validating', 'in_progress', 'finalizing', 'cancelling')")
    op.create_index("ix_batch_open", "batch", ["id"], postgresql_where=is_open)
    op.create_table(
        "batch_line",
        sa.Column("batch_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, comment="of the line in the input file, from 1"),
        sa.Column("custom_id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False, comment="of its first byte in the input file, from 0"),
        sa.Column("length", sa.Integer(), nullable=False, comment="bytes"),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False, comment="an estimate: lines run in its order"),
        sa.Column("tries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("claimed_by", sa.Uuid(), nullable=True, comment="the gateway process that runs it"),
        _time("claimed_until", default=True),
        sa.Column(
            "output",
            sa.LargeBinary(),
            nullable=True,
            comment="its line of the output or error file; NULL until it has run",
        ),
        sa.Column("failed", sa.Boolean(), nullable=True, comment="whether `output` belongs into the error file"),
        sa.ForeignKeyConstraint(["batch_id"], ["batch.id"], name=op.f("fk_batch_line_batch_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("batch_id", "number", name=op.f("pk_batch_line")),
    )
    order = ["batch_id", "prompt_tokens", "number"]
    op.create_index("ix_batch_line_open", "batch_line", order, postgresql_where=sa.text("output IS NULL"))


def _time(name: str, *, nullable: bool = False, default: bool = False, comment: str | None = None) -> sa.Column[object]:
    now = sa.text("now()") if default else None
    return sa.Column(name, sa.DateTime(timezone=True), server_default=now, nullable=nullable, comment=comment)


def downgrade() -> None:
    op.drop_table("batch_line")
    op.drop_table("batch")
    op.drop_table("file_chunk")
    op.drop_table("file")
    op.execute("DELETE FROM price_version WHERE tier = 'batch'")
    op.drop_constraint(op.f(_NEW_PRICE_KEY), "price_version", type_="unique")
    op.drop_constraint(op.f("ck_price_version_tier"), "price_version", type_="check")
    op.drop_column("price_version", "tier")
    op.create_unique_constraint(op.f(_OLD_PRICE_KEY), "price_version", ["book", "model", "upstream", "effective_at"])
