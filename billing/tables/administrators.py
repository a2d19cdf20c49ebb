"""Who administers: people, their tokens, what they did, and the answers kept for repeated writes."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    Table,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from billing.tables.base import Timestamp, created, id_column, metadata

_ROLE = "role IN ('owner', 'admin', 'billing_reader', 'member')"
_ACTIVE = text("revoked_at IS NULL")

administrator = Table(
    "administrator",
    metadata,
    id_column(),
    Column("name", Text, nullable=False),
    Column("email", Text, nullable=True, comment="in lower case; who signs in with it at the provider is this person"),
    Column("issuer", Text, nullable=True, comment="the OIDC provider that knows the subject"),
    Column("subject", Text, nullable=True, comment="who it is there, from the first sign-in on"),
    Column("role", Text, nullable=False),
    Column("role_claimed", Boolean, nullable=False, server_default=text("false"), comment="a provider's claim gave it"),
    Column("org_id", ForeignKey("org.id"), nullable=True, comment="the only one it may see; NULL: all"),
    Column("user_id", ForeignKey("app_user.id"), nullable=True, comment="who a member is"),
    created(),
    Column("revoked_at", Timestamp, nullable=True),
    CheckConstraint(_ROLE, name="role"),
    CheckConstraint("(role = 'member') = (user_id IS NOT NULL)", name="a_member_is_a_user"),
    CheckConstraint("user_id IS NULL OR org_id IS NOT NULL", name="a_member_is_in_an_org"),
    CheckConstraint("(issuer IS NULL) = (subject IS NULL)", name="subject_of_an_issuer"),
    Index("uq_administrator_email", "email", unique=True, postgresql_where=_ACTIVE),
    Index("uq_administrator_issuer_subject", "issuer", "subject", unique=True, postgresql_where=_ACTIVE),
)

admin_token = Table(
    "admin_token",
    metadata,
    id_column(),
    Column("administrator_id", ForeignKey("administrator.id"), nullable=False, index=True),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False, comment="First characters of the token, safe to show"),
    Column("hash", LargeBinary, nullable=False, unique=True, comment="SHA-256 of the token; it itself is not kept"),
    Column("role", Text, nullable=False, comment="the most it may do; never more than its administrator"),
    created(),
    Column("expires_at", Timestamp, nullable=True),
    Column("revoked_at", Timestamp, nullable=True),
    CheckConstraint(_ROLE, name="role"),
)

# A trigger writes it and another one refuses to change it: see billing/audit.py.
audit_log = Table(
    "audit_log",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", Timestamp, nullable=False, server_default=func.now()),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("noun", Text, nullable=False),
    Column("noun_id", Text, nullable=True),
    Column("before", JSONB, nullable=True),
    Column("after", JSONB, nullable=True),
    CheckConstraint("action IN ('create', 'change', 'remove')", name="action"),
    Index(None, "noun", "noun_id", "id"),
)

idempotent_write = Table(
    "idempotent_write",
    metadata,
    Column("key_hash", LargeBinary, primary_key=True, comment="SHA-256 of who wrote and their Idempotency-Key"),
    Column("request_hash", LargeBinary, nullable=False, comment="SHA-256 of method, path and body"),
    Column("answer", LargeBinary, nullable=True, comment="encrypted: it may hold a key that was just made"),
    Column("expires_at", Timestamp, nullable=False, index=True),
)
