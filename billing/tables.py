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
from sqlalchemy.dialects.postgresql import JSONB

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
    Column("prefix", Text, nullable=False, comment="First characters of the key, safe to show"),
    Column("hash", LargeBinary, nullable=False, unique=True, comment="SHA-256 of the key; the key itself is not kept"),
    _created(),
    Column("expires_at", Timestamp, nullable=True),
    Column("revoked_at", Timestamp, nullable=True),
)

budget = Table(
    "budget",
    metadata,
    _id(),
    Column("scope_kind", Text, nullable=False),
    Column("scope_id", Text, nullable=False),
    Column("window", Text, nullable=False, comment="hour, day, week, month or none"),
    Column("time_zone", Text, nullable=False, server_default="UTC"),
    Column("limit_amount", Numeric, nullable=False),
    Column("currency", Text, nullable=False),
    Column("hard", Boolean, nullable=False, server_default=text("true")),
    _created(),
    UniqueConstraint("scope_kind", "scope_id", "window"),
    CheckConstraint("limit_amount >= 0", name="limit_not_negative"),
    CheckConstraint("scope_kind IN ('org', 'team', 'user', 'key', 'tag', 'model')", name="scope_kind"),
    CheckConstraint("\"window\" IN ('hour', 'day', 'week', 'month', 'none')", name="window"),
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

hold = Table(
    "hold",
    metadata,
    Column("operation_id", Uuid, primary_key=True),
    Column("budget_id", ForeignKey("budget.id", ondelete="CASCADE"), primary_key=True),
    Column("starts_at", Timestamp, nullable=False),
    Column("amount", Numeric, nullable=False),
    Column("replica", Text, nullable=False, comment="Which gateway process took it"),
    _created(),
    CheckConstraint("amount >= 0", name="amount_not_negative"),
)

price_version = Table(
    "price_version",
    metadata,
    _id(),
    Column("book", Text, nullable=False, comment="sale: what the user is billed; cost: what the operator pays"),
    Column("model", Text, nullable=False),
    Column("upstream", Text, nullable=False, server_default="", comment="empty on a sale price"),
    Column("effective_at", Timestamp, nullable=False, server_default=func.now()),
    Column("currency", Text, nullable=False),
    *(Column(name, Numeric, nullable=True, comment="per million tokens") for name in TOKEN_CLASSES),
    Column("device_hour", Numeric, nullable=True, comment="price of one device for an hour, on a cost by device time"),
    UniqueConstraint("book", "model", "upstream", "effective_at"),
    CheckConstraint("book IN ('sale', 'cost')", name="book"),
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
