"""The ledger: rollups, payloads."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

COUNTS = (
    *("operations", "failed", "refused", "invalid", "client_closed", "routed", "cache_hits"),
    *("input_fresh", "input_cached", "input_cache_write", "output_text", "output_reasoning"),
    *("billed_unknown", "cost_unknown", "cache_saved_unknown"),
)
SUMS = ("billed", "cost", "margin")
AMOUNTS = ("billed_adjustment", "cost_adjustment", "cache_saved")
OWNERS = ("org_id", "team_id", "user_id", "key_id", "model", "currency")
TAGS = ("org_id", "name", "value", "model", "currency")
ROLLUPS = {"usage_hour": OWNERS, "usage_day": OWNERS, "usage_hour_tag": TAGS, "usage_day_tag": TAGS}
SOURCES = ("operation", "adjustment")


def upgrade() -> None:
    _payload()
    for table, about in ROLLUPS.items():
        _rollup(table, about)
    op.create_table(
        "usage_stale",
        sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False),
        sa.Column("bucket", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_stale")),
    )
    op.create_index(op.f("ix_usage_stale_bucket"), "usage_stale", ["bucket"])
    op.execute("""
        CREATE FUNCTION mark_usage_stale() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO usage_stale (bucket) SELECT DISTINCT date_trunc('hour', started_at, 'UTC') FROM added;
            RETURN NULL;
        END $$
    """)
    for table in SOURCES:
        op.execute(
            f"CREATE TRIGGER mark_usage_stale AFTER INSERT ON {table} REFERENCING NEW TABLE AS added "
            "FOR EACH STATEMENT EXECUTE FUNCTION mark_usage_stale()"
        )
    # The hours that the ledger has, one look into the index for each, however many rows there are.
    op.execute("""
        INSERT INTO usage_stale (bucket)
        WITH RECURSIVE hour (bucket) AS (
            SELECT date_trunc('hour', min(started_at), 'UTC') FROM operation
            UNION ALL
            SELECT (
                SELECT date_trunc('hour', min(started_at), 'UTC') FROM operation
                WHERE started_at >= hour.bucket + interval '1 hour'
            ) FROM hour WHERE hour.bucket IS NOT NULL
        )
        SELECT bucket FROM hour WHERE bucket IS NOT NULL
    """)


def _payload() -> None:
    op.add_column(
        "api_key", sa.Column("record_payloads", sa.Boolean(), server_default=sa.text("false"), nullable=False)
    )
    comment = "its first bytes; all, where they are request_bytes"
    op.create_table(
        "payload",
        sa.Column("operation_id", sa.Uuid(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False, comment=comment),
        sa.Column("request_bytes", sa.BigInteger(), nullable=False, comment="of the whole request"),
        sa.Column(
            "answer", sa.LargeBinary(), nullable=False, comment="likewise; of a stream, its events as they were sent"
        ),
        sa.Column("answer_bytes", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("octet_length(request) <= request_bytes", name=op.f("ck_payload_request_is_its_start")),
        sa.CheckConstraint("octet_length(answer) <= answer_bytes", name=op.f("ck_payload_answer_is_its_start")),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_payload")),
        postgresql_partition_by="RANGE (operation_id)",
    )
    op.execute("CREATE TABLE payload_default PARTITION OF payload DEFAULT")


def _rollup(table: str, about: Sequence[str]) -> None:
    op.create_table(
        table,
        sa.Column("bucket", sa.DateTime(timezone=True), nullable=False, comment="start of the hour or day, UTC"),
        *(
            sa.Column(name, sa.Uuid() if name.endswith("_id") else sa.Text(), nullable=name in ("team_id", "user_id"))
            for name in about
        ),
        sa.Column("dropped", sa.Date(), comment="the ledger's day that these were in, where it is dropped"),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in COUNTS),
        *(sa.Column(name, sa.Numeric(), nullable=True) for name in SUMS),
        *(sa.Column(name, sa.Numeric(), nullable=False) for name in AMOUNTS),
        sa.UniqueConstraint("bucket", *about, "dropped", name=f"uq_{table}", postgresql_nulls_not_distinct=True),
        postgresql_partition_by="RANGE (bucket)",
    )
    op.execute(f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT")


def downgrade() -> None:
    for table in SOURCES:
        op.execute(f"DROP TRIGGER mark_usage_stale ON {table}")
    op.execute("DROP FUNCTION mark_usage_stale()")
    for table in ("usage_stale", *ROLLUPS, "payload"):
        op.drop_table(table)
    op.drop_column("api_key", "record_payloads")
