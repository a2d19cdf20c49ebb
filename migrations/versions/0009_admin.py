"""Administrators, their tokens, the audit log and the answers of repeated writes."""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0009"
down_revision = "0008"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_AUDITED: tuple[tuple[str, ...], ...] = (
    # table, what people call it, columns that the log never shows
    ("org", "org"),
    ("team", "team"),
    ("app_user", "user"),
    ("api_key", "key"),
    ("budget", "budget"),
    ("price_version", "price"),
    ("alert_rule", "alert rule"),
    ("alert_channel", "alert channel"),
    ("alert_silence", "silence"),
    ("administrator", "administrator"),
    ("admin_token", "token", "hash"),
)

# A hidden column that an UPDATE changed is named in `after`, without its value.
_WRITE = """
CREATE FUNCTION farthing_audit() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    old_row jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) END;
    new_row jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) END;
    hidden text;
    changed boolean;
BEGIN
    IF old_row = new_row THEN
        RETURN NULL;
    END IF;
    FOR i IN 1 .. TG_NARGS - 1 LOOP
        hidden := TG_ARGV[i];
        changed := TG_OP = 'UPDATE' AND old_row -> hidden IS DISTINCT FROM new_row -> hidden;
        old_row := old_row - hidden;
        new_row := new_row - hidden;
        IF changed THEN
            new_row := new_row || jsonb_build_object(hidden, '(changed)');
        END IF;
    END LOOP;
    INSERT INTO audit_log (actor, action, noun, noun_id, before, after) VALUES (
        coalesce(nullif(current_setting('farthing.actor', true), ''), 'database:' || session_user),
        CASE TG_OP WHEN 'INSERT' THEN 'create' WHEN 'UPDATE' THEN 'change' ELSE 'remove' END,
        TG_ARGV[0],
        coalesce(coalesce(new_row, old_row) ->> 'id', coalesce(new_row, old_row) ->> 'name'),
        old_row,
        new_row
    );
    RETURN NULL;
END $$
"""

_REFUSE = """
CREATE FUNCTION farthing_audit_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit log is only ever added to' USING ERRCODE = 'insufficient_privilege';
END $$
"""


def upgrade() -> None:
    _administrators()
    _audit_log()
    op.create_table(
        "idempotent_write",
        sa.Column(
            "key_hash", sa.LargeBinary(), nullable=False, comment="SHA-256 of who wrote and their Idempotency-Key"
        ),
        sa.Column("request_hash", sa.LargeBinary(), nullable=False, comment="SHA-256 of method, path and body"),
        sa.Column("answer", sa.LargeBinary(), nullable=True, comment="encrypted: it may hold a key that was just made"),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key_hash", name=op.f("pk_idempotent_write")),
    )
    op.create_index(op.f("ix_idempotent_write_expires_at"), "idempotent_write", ["expires_at"])


def _administrators() -> None:
    role = "role IN ('owner', 'admin', 'billing_reader', 'member')"
    email = "in lower case; who signs in with it at the provider is this person"
    op.create_table(
        "administrator",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("email", sa.Text(), nullable=True, comment=email),
        sa.Column("issuer", sa.Text(), nullable=True, comment="the OIDC provider that knows the subject"),
        sa.Column("subject", sa.Text(), nullable=True, comment="who it is there, from the first sign-in on"),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("org_id", sa.Uuid(), nullable=True, comment="the only one it may see; NULL: all"),
        sa.Column("user_id", sa.Uuid(), nullable=True, comment="who a member is"),
        _created(),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(role, name=op.f("ck_administrator_role")),
        sa.CheckConstraint(
            "(role = 'member') = (user_id IS NOT NULL)", name=op.f("ck_administrator_a_member_is_a_user")
        ),
        sa.CheckConstraint(
            "user_id IS NULL OR org_id IS NOT NULL", name=op.f("ck_administrator_a_member_is_in_an_org")
        ),
        sa.CheckConstraint("(issuer IS NULL) = (subject IS NULL)", name=op.f("ck_administrator_subject_of_an_issuer")),
        sa.ForeignKeyConstraint(["org_id"], ["org.id"], name=op.f("fk_administrator_org_id")),
        sa.ForeignKeyConstraint(["user_id"], ["app_user.id"], name=op.f("fk_administrator_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_administrator")),
    )
    active = sa.text("revoked_at IS NULL")
    op.create_index("uq_administrator_email", "administrator", ["email"], unique=True, postgresql_where=active)
    op.create_index(
        "uq_administrator_issuer_subject",
        "administrator",
        ["issuer", "subject"],
        unique=True,
        postgresql_where=active,
    )
    op.create_table(
        "admin_token",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("administrator_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False, comment="First characters of the token, safe to show"),
        sa.Column("hash", sa.LargeBinary(), nullable=False, comment="SHA-256 of the token; it itself is not kept"),
        sa.Column("role", sa.Text(), nullable=False, comment="the most it may do; never more than its administrator"),
        _created(),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(role, name=op.f("ck_admin_token_role")),
        sa.ForeignKeyConstraint(
            ["administrator_id"], ["administrator.id"], name=op.f("fk_admin_token_administrator_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_admin_token")),
        sa.UniqueConstraint("hash", name=op.f("uq_admin_token_hash")),
    )
    op.create_index(op.f("ix_admin_token_administrator_id"), "admin_token", ["administrator_id"])


def _audit_log() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("noun", sa.Text(), nullable=False),
        sa.Column("noun_id", sa.Text(), nullable=True),
        sa.Column("before", postgresql.JSONB(), nullable=True),
        sa.Column("after", postgresql.JSONB(), nullable=True),
        sa.CheckConstraint("action IN ('create', 'change', 'remove')", name=op.f("ck_audit_log_action")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index(op.f("ix_audit_log_noun_noun_id_id"), "audit_log", ["noun", "noun_id", "id"])
    op.execute(_WRITE)
    op.execute(_REFUSE)
    op.execute(
        "CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log "
        "FOR EACH STATEMENT EXECUTE FUNCTION farthing_audit_refuse()"
    )
    for table, *words in _AUDITED:
        arguments = ", ".join(f"'{word}'" for word in words)
        op.execute(
            f"CREATE TRIGGER farthing_audit AFTER INSERT OR UPDATE OR DELETE ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION farthing_audit({arguments})"
        )


def _created() -> sa.Column[object]:
    return sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False)


def downgrade() -> None:
    for table, *_ in _AUDITED:
        op.execute(f"DROP TRIGGER farthing_audit ON {table}")
    op.drop_table("idempotent_write")
    op.drop_table("audit_log")
    op.drop_table("admin_token")
    op.drop_table("administrator")
    op.execute("DROP FUNCTION farthing_audit()")
    op.execute("DROP FUNCTION farthing_audit_refuse()")
