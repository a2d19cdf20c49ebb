"""The schema: one SQLAlchemy `Table` a noun. Alembic compares `metadata` with the database; nothing else defines it.

Money is NUMERIC in currency units, never rounded here; NULL means unknown. `operation` and `attempt` are partitioned by
range of their UUIDv7 id, one partition a day: the id carries the time, so a resend lands in the same partition as the
first send and the primary key rejects it.
"""

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import CIDR, JSONB

from billing.records import TOKEN_CLASSES

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Timestamp = DateTime(timezone=True)

OPEN_BATCH_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
BATCH_STATUSES = (*OPEN_BATCH_STATUSES, "failed", "completed", "expired", "cancelled")
BATCH_MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
BATCH_USAGE = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
BATCH_IS_OPEN = f"status IN ({', '.join(map(repr, OPEN_BATCH_STATUSES))})"
"""Say it in a query just so, and PostgreSQL looks at the few open batches alone."""


def _id() -> Column[object]:
    return Column("id", Uuid, primary_key=True)


def _created() -> Column[object]:
    return Column("created_at", Timestamp, nullable=False, server_default=func.now())


org = Table("org", metadata, _id(), Column("name", Text, nullable=False, unique=True), _created())

team = Table(
    "team",
    metadata,
    _id(),
    Column("org_id", ForeignKey("org.id"), nullable=False),
    Column("name", Text, nullable=False),
    _created(),
    UniqueConstraint("org_id", "name"),
)

# "user" is a reserved word in SQL.
app_user = Table(
    "app_user",
    metadata,
    _id(),
    Column("org_id", ForeignKey("org.id"), nullable=False),
    Column("team_id", ForeignKey("team.id"), nullable=True),
    Column("name", Text, nullable=False),
    _created(),
    UniqueConstraint("org_id", "name"),
)

api_key = Table(
    "api_key",
    metadata,
    _id(),
    Column("org_id", ForeignKey("org.id"), nullable=False),
    Column("team_id", ForeignKey("team.id"), nullable=True),
    Column("user_id", ForeignKey("app_user.id"), nullable=True),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False, comment="First characters of the newest secret, safe to show"),
    _created(),
    Column("expires_at", Timestamp, nullable=True),
    Column("revoked_at", Timestamp, nullable=True),
    Column("models", ARRAY(Text), nullable=True, comment="Names it may ask for; NULL: any"),
    Column("routes", ARRAY(Text), nullable=True, comment="Interfaces it may use; NULL: any"),
    Column("networks", ARRAY(CIDR), nullable=True, comment="Where it may be used from; NULL: anywhere"),
    Column("tags", JSONB, nullable=False, server_default=text("'{}'"), comment="On every operation"),
    Column("may_attribute", Boolean, nullable=False, server_default=text("false")),
)

# A key outlives its secrets: after a rotation the old one works beside the new one for a while.
key_secret = Table(
    "key_secret",
    metadata,
    Column("hash", LargeBinary, primary_key=True, comment="SHA-256 of the secret; the secret itself is not kept"),
    Column("key_id", ForeignKey("api_key.id", ondelete="CASCADE"), nullable=False, index=True),
    _created(),
    Column("ends_at", Timestamp, nullable=True, comment="When a newer secret has replaced it; NULL: the newest"),
)

# What a scope may use up in a window: money (a budget) or anything else that is counted (a limit).
budget = Table(
    "budget",
    metadata,
    _id(),
    Column("scope_kind", Text, nullable=False),
    Column("scope_id", Text, nullable=False),
    Column("unit", Text, nullable=False, server_default="money", comment="money, requests, tokens or concurrent"),
    Column("window", Text, nullable=False, comment="minute (of a limit), hour, day, week, month or none"),
    Column("time_zone", Text, nullable=False, server_default="UTC"),
    Column("limit_amount", Numeric, nullable=False),
    Column("currency", Text, nullable=True, comment="of money"),
    Column("hard", Boolean, nullable=False, server_default=text("true")),
    _created(),
    UniqueConstraint("scope_kind", "scope_id", "unit", "window"),
    CheckConstraint("limit_amount >= 0", name="limit_not_negative"),
    CheckConstraint("scope_kind IN ('org', 'team', 'user', 'key', 'tag', 'model')", name="scope_kind"),
    CheckConstraint("\"window\" IN ('minute', 'hour', 'day', 'week', 'month', 'none')", name="window"),
    CheckConstraint("unit IN ('money', 'requests', 'tokens', 'concurrent')", name="unit"),
    CheckConstraint("(unit = 'money') = (currency IS NOT NULL)", name="money_has_a_currency"),
)

budget_window = Table(
    "budget_window",
    metadata,
    Column("budget_id", ForeignKey("budget.id", ondelete="CASCADE"), primary_key=True),
    Column("starts_at", Timestamp, primary_key=True),
    Column("leased", Numeric, nullable=False, server_default=text("0")),
    Column("settled", Numeric, nullable=False, server_default=text("0")),
    CheckConstraint("leased >= 0", name="leased_not_negative"),
    CheckConstraint("settled >= 0", name="settled_not_negative"),
)

# What a gateway process has taken out of a window: `leased` there is the sum of granted - settled here.
lease = Table(
    "lease",
    metadata,
    Column("budget_id", Uuid, primary_key=True),
    Column("starts_at", Timestamp, primary_key=True),
    Column("replica", Text, primary_key=True, comment="place.run of the process's spool"),
    Column("granted", Numeric, nullable=False, comment="taken out and not given back"),
    Column("settled", Numeric, nullable=False, server_default=text("0"), comment="of it, what the ledger has charged"),
    Column("renewed_at", Timestamp, nullable=False, server_default=func.now(), comment="on a limit of calls at once"),
    ForeignKeyConstraint(
        ["budget_id", "starts_at"], ["budget_window.budget_id", "budget_window.starts_at"], ondelete="CASCADE"
    ),
    CheckConstraint("settled >= 0", name="settled_not_negative"),
    CheckConstraint("granted >= settled", name="settled_was_granted"),
    Index(None, "replica"),
)

# Operations that could not be stored and were charged all the same, so that they are charged once.
operation_set_aside = Table("operation_set_aside", metadata, _id(), _created())

price_version = Table(
    "price_version",
    metadata,
    _id(),
    Column("book", Text, nullable=False, comment="sale: what the user is billed; cost: what the operator pays"),
    Column("model", Text, nullable=False),
    Column("upstream", Text, nullable=False, server_default="", comment="empty on a sale price"),
    Column("tier", Text, nullable=False, server_default="standard", comment="standard, or batch for a batch's lines"),
    Column("effective_at", Timestamp, nullable=False, server_default=func.now()),
    Column("currency", Text, nullable=False),
    *(Column(name, Numeric, nullable=True, comment="per million tokens") for name in TOKEN_CLASSES),
    Column("device_hour", Numeric, nullable=True, comment="price of one device for an hour, on a cost by device time"),
    UniqueConstraint("book", "model", "upstream", "tier", "effective_at"),
    CheckConstraint("book IN ('sale', 'cost')", name="book"),
    CheckConstraint("tier IN ('standard', 'batch')", name="tier"),
)

operation = Table(
    "operation",
    metadata,
    _id(),
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

file = Table(
    "file",
    metadata,
    _id(),
    Column("org_id", ForeignKey("org.id"), nullable=False),
    Column("key_id", ForeignKey("api_key.id"), nullable=False, comment="who uploaded it, or whose batch wrote it"),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=True, comment="NULL until all of it is here"),
    _created(),
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
    _id(),
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
    _created(),
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
