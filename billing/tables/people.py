"""Who calls: orgs, teams, users, keys and their secrets."""

from sqlalchemy import (
    ARRAY,
    Boolean,
    Column,
    ForeignKey,
    LargeBinary,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import CIDR, JSONB

from billing.tables.base import Timestamp, created, id_column, metadata

org = Table(
    "org",
    metadata,
    id_column(),
    Column("name", Text, nullable=False, unique=True),
    created(),
    Column(
        "billing_time_zone",
        Text,
        nullable=False,
        server_default="UTC",
        comment="on whose clock its invoices' months begin",
    ),
)

team = Table(
    "team",
    metadata,
    id_column(),
    Column("org_id", ForeignKey("org.id"), nullable=False),
    Column("name", Text, nullable=False),
    created(),
    UniqueConstraint("org_id", "name"),
)

# "user" is a reserved word in SQL.
app_user = Table(
    "app_user",
    metadata,
    id_column(),
    Column("org_id", ForeignKey("org.id"), nullable=False),
    Column("team_id", ForeignKey("team.id"), nullable=True),
    Column("name", Text, nullable=False),
    created(),
    UniqueConstraint("org_id", "name"),
)

api_key = Table(
    "api_key",
    metadata,
    id_column(),
    Column("org_id", ForeignKey("org.id"), nullable=False),
    Column("team_id", ForeignKey("team.id"), nullable=True),
    Column("user_id", ForeignKey("app_user.id"), nullable=True),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False, comment="First characters of the newest secret, safe to show"),
    created(),
    Column("expires_at", Timestamp, nullable=True),
    Column("revoked_at", Timestamp, nullable=True),
    Column("models", ARRAY(Text), nullable=True, comment="Names it may ask for; NULL: any"),
    Column("routes", ARRAY(Text), nullable=True, comment="Interfaces it may use; NULL: any"),
    Column("networks", ARRAY(CIDR), nullable=True, comment="Where it may be used from; NULL: anywhere"),
    Column("tags", JSONB, nullable=False, server_default=text("'{}'"), comment="On every operation"),
    Column("may_attribute", Boolean, nullable=False, server_default=text("false")),
    Column("record_payloads", Boolean, nullable=False, server_default=text("false")),
)

# A key outlives its secrets: after a rotation the old one works beside the new one for a while.
key_secret = Table(
    "key_secret",
    metadata,
    Column("hash", LargeBinary, primary_key=True, comment="SHA-256 of the secret; the secret itself is not kept"),
    Column("key_id", ForeignKey("api_key.id", ondelete="CASCADE"), nullable=False, index=True),
    created(),
    Column("ends_at", Timestamp, nullable=True, comment="When a newer secret has replaced it; NULL: the newest"),
)
