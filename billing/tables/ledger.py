"""What happened: one row an operation, one an attempt, in partitions by day."""

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    Numeric,
    Table,
    Text,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from billing.records import TOKEN_CLASSES
from billing.tables.base import Timestamp, created, id_column, metadata

operation = Table(
    "operation",
    metadata,
    id_column(),
    Column("started_at", Timestamp, nullable=False),
    Column("recorded_at", Timestamp, nullable=False, server_default=func.now()),
    Column("org_id", Uuid, nullable=False),
    Column("team_id", Uuid, nullable=True),
    Column("user_id", Uuid, nullable=True),
    Column("key_id", Uuid, nullable=False),
    Column("tags", JSONB, nullable=False, server_default=text("'{}'")),
    Column("api", Text, nullable=False),
    Column("requested_model", Text, nullable=False),
    Column("model", Text, nullable=True),
    Column("route_reasons", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("route_score", Double, nullable=True),
    Column("stream", Boolean, nullable=False),
    Column("status", Text, nullable=False),
    Column("http_status", Integer, nullable=False),
    Column("finish_reason", Text, nullable=True),
    Column("error", Text, nullable=True),
    Column("ttft_seconds", Double, nullable=True),
    Column("total_seconds", Double, nullable=False),
    Column("billed", Numeric, nullable=True),
    Column("cost", Numeric, nullable=True),
    Column("currency", Text, nullable=False),
    Index(None, "started_at"),
    Index(None, "user_id", "started_at"),
    Index(None, "key_id", "started_at"),
    postgresql_partition_by="RANGE (id)",
)

attempt = Table(
    "attempt",
    metadata,
    Column("operation_id", Uuid, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("upstream", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("started_at", Timestamp, nullable=False),
    Column("status", Text, nullable=False),
    Column("http_status", Integer, nullable=True),
    Column("error", Text, nullable=True),
    *(Column(name, BigInteger, nullable=False) for name in TOKEN_CLASSES),
    Column("usage_source", Text, nullable=False),
    Column("usage_flag", Text, nullable=True, comment="what was inconsistent in the reported usage"),
    Column("generated_tokens", BigInteger, nullable=True),
    Column("recomputed_tokens", BigInteger, nullable=True),
    Column("prefill_device_seconds", Double, nullable=True),
    Column("decode_device_seconds", Double, nullable=True),
    Column("kv_block_seconds", Double, nullable=True),
    Column("queue_seconds", Double, nullable=True),
    Column("ttft_seconds", Double, nullable=True),
    Column("total_seconds", Double, nullable=False),
    Column("preemptions", Integer, nullable=True),
    Column("price_version_id", Uuid, nullable=True),
    Column("cost_version_id", Uuid, nullable=True),
    Column("billed", Numeric, nullable=True),
    Column("cost", Numeric, nullable=True),
    *(CheckConstraint(f"{name} >= 0", name=f"{name}_not_negative") for name in TOKEN_CLASSES),
    postgresql_partition_by="RANGE (operation_id)",
)

# Operations that could not be stored and were charged all the same, so that they are charged once.
operation_set_aside = Table("operation_set_aside", metadata, id_column(), created())
