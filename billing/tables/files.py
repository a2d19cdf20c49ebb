"""Files and batches of the API."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from billing.tables.base import Timestamp, created, id_column, metadata

OPEN_BATCH_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
BATCH_STATUSES = (*OPEN_BATCH_STATUSES, "failed", "completed", "expired", "cancelled")
BATCH_MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
BATCH_USAGE = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
BATCH_IS_OPEN = f"status IN ({', '.join(map(repr, OPEN_BATCH_STATUSES))})"
"""Say it in a query just so, and PostgreSQL looks at the few open batches alone."""

file = Table(
    "file",
    metadata,
    id_column(),
    Column("org_id", ForeignKey("org.id"), nullable=False),
    Column("key_id", ForeignKey("api_key.id"), nullable=False, comment="who uploaded it, or whose batch wrote it"),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=True, comment="NULL until all of it is here"),
    created(),
    Column("expires_at", Timestamp, nullable=False, comment="deleted from then on; a DELETE sets it to now"),
    CheckConstraint("purpose IN ('batch', 'batch_output')", name="purpose"),
    Index(None, "org_id", "id"),
    Index(None, "expires_at"),
)

file_chunk = Table(
    "file_chunk",
    metadata,
    Column("file_id", ForeignKey("file.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False, comment="1 MiB, the last one less; stored uncompressed, read in parts"),
)

batch = Table(
    "batch",
    metadata,
    id_column(),
    Column("org_id", ForeignKey("org.id"), nullable=False),
    Column("key_id", ForeignKey("api_key.id"), nullable=False, comment="on whose behalf its lines run"),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", Uuid, nullable=False, comment="of a file that may have expired since"),
    Column("metadata", JSONB(none_as_null=True), nullable=True),
    Column("output_seconds", Integer, nullable=False, comment="how long its output files are kept"),
    Column("status", Text, nullable=False, server_default="validating"),
    Column("errors", JSONB(none_as_null=True), nullable=True, comment="what is wrong with the input file"),
    Column("model", Text, nullable=True, comment="NULL where its lines name different ones"),
    Column("output_file_id", Uuid, nullable=True),
    Column("error_file_id", Uuid, nullable=True),
    *(Column(name, Integer, nullable=False, server_default=text("0")) for name in ("total", "completed", "failed")),
    *(Column(name, BigInteger, nullable=False, server_default=text("0")) for name in BATCH_USAGE),
    created(),
    Column("expires_at", Timestamp, nullable=False),
    *(Column(f"{name}_at", Timestamp, nullable=True) for name in BATCH_MOMENTS),
    Column("paused_until", Timestamp, nullable=False, server_default=func.now(), comment="no line starts before"),
    Column("pauses", Integer, nullable=False, server_default=text("0"), comment="since a line last finished"),
    Column("claimed_by", Uuid, nullable=True, comment="the gateway process that validates or finalizes it"),
    Column("claimed_until", Timestamp, nullable=False, server_default=func.now()),
    CheckConstraint(f"status IN ({', '.join(map(repr, BATCH_STATUSES))})", name="status"),
    Index(None, "org_id", "id"),
    Index("ix_batch_open", "id", postgresql_where=text(BATCH_IS_OPEN)),
)

batch_line = Table(
    "batch_line",
    metadata,
    Column("batch_id", ForeignKey("batch.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, comment="of the line in the input file, from 1"),
    Column("custom_id", Text, nullable=False),
    Column("position", BigInteger, nullable=False, comment="of its first byte in the input file, from 0"),
    Column("length", Integer, nullable=False, comment="bytes"),
    Column("prompt_tokens", Integer, nullable=False, comment="an estimate: lines run in its order"),
    Column("tries", Integer, nullable=False, server_default=text("0")),
    Column("claimed_by", Uuid, nullable=True, comment="the gateway process that runs it"),
    Column("claimed_until", Timestamp, nullable=False, server_default=func.now()),
    Column("output", LargeBinary, nullable=True, comment="its line of the output or error file; NULL until it has run"),
    Column("failed", Boolean, nullable=True, comment="whether `output` belongs into the error file"),
    Index("ix_batch_line_open", "batch_id", "prompt_tokens", "number", postgresql_where=text("output IS NULL")),
)
