"""Invoices, which nothing but a void ever changes, and the time zone that an org's months are in.

Revision ID: 0010
Revises: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

KEEP_INVOICE = """
CREATE FUNCTION farthing_keep_invoice() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND TG_TABLE_NAME = 'invoice' THEN
        IF OLD.voided_at IS NULL
           AND to_jsonb(NEW) - 'voided_at' - 'void_reason' = to_jsonb(OLD) - 'voided_at' - 'void_reason' THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE EXCEPTION 'an issued invoice is never changed: void it and issue another'
        USING ERRCODE = 'integrity_constraint_violation';
END $$
"""


def upgrade() -> None:
    op.add_column(
        "org",
        sa.Column(
            "billing_time_zone",
            sa.Text(),
            server_default="UTC",
            nullable=False,
            comment="on whose clock its invoices' months begin",
        ),
    )
    op.create_table(
        "invoice",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("org_id", sa.Uuid(), nullable=False),
        sa.Column("team_id", sa.Uuid(), nullable=True, comment="NULL: of the whole org"),
        sa.Column("number", sa.Integer(), nullable=False, comment="from 1 within the org, without gaps"),
        sa.Column("label", sa.Text(), nullable=False, comment="the number as it is printed"),
        sa.Column("month", sa.Text(), nullable=False, comment="like 2026-11, on the clock of time_zone"),
        sa.Column("time_zone", sa.Text(), nullable=False),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False, comment="exclusive"),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("customer", sa.Text(), nullable=False, comment="names of the org and team when it was issued"),
        sa.Column("issuer", sa.Text(), nullable=False),
        sa.Column("bill_to", sa.Text(), nullable=False),
        sa.Column("exact_total", sa.Numeric(), nullable=False, comment="of the lines before rounding"),
        sa.Column("total", sa.Numeric(), nullable=False, comment="of the rounded lines"),
        sa.Column(
            "unknown",
            sa.BigInteger(),
            nullable=False,
            comment="the month's operations without a known charge: on no line",
        ),
        sa.Column("issued_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("voided_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("void_reason", sa.Text(), nullable=True),
        sa.CheckConstraint("starts_at < ends_at", name=op.f("ck_invoice_month_has_days")),
        sa.CheckConstraint("(voided_at IS NULL) = (void_reason IS NULL)", name=op.f("ck_invoice_void_has_a_reason")),
        sa.ForeignKeyConstraint(["org_id"], ["org.id"], name=op.f("fk_invoice_org_id")),
        sa.ForeignKeyConstraint(["team_id"], ["team.id"], name=op.f("fk_invoice_team_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invoice")),
        sa.UniqueConstraint("label", name=op.f("uq_invoice_label")),
        sa.UniqueConstraint("org_id", "number", name=op.f("uq_invoice_org_id_number")),
    )
    op.create_table(
        "invoice_line",
        sa.Column("invoice_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, comment="from 1 within the invoice"),
        sa.Column(
            "month",
            sa.Text(),
            nullable=False,
            comment="of the usage: an earlier one than the invoice's where it came late",
        ),
        sa.Column("model", sa.Text(), nullable=False, comment="empty on a line that belongs to none"),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column(
            "part",
            sa.Text(),
            nullable=False,
            comment="a token class, request, image, response_cache, adjustment or other",
        ),
        sa.Column("price_version_id", sa.Uuid(), nullable=True),
        sa.Column("override_id", sa.Uuid(), nullable=True, comment="whose terms changed that price"),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("quantity", sa.Numeric(), nullable=False),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column(
            "unit_price",
            sa.Numeric(),
            nullable=True,
            comment="of `per` units; NULL where the amount is a sum of charges",
        ),
        sa.Column("per", sa.Integer(), nullable=False),
        sa.Column("exact_amount", sa.Numeric(), nullable=False, comment="quantity * unit_price / per"),
        sa.Column("amount", sa.Numeric(), nullable=False, comment="rounded half-even to the currency's smallest coin"),
        sa.CheckConstraint("per > 0", name=op.f("ck_invoice_line_per_is_positive")),
        sa.ForeignKeyConstraint(["invoice_id"], ["invoice.id"], name=op.f("fk_invoice_line_invoice_id")),
        sa.PrimaryKeyConstraint("invoice_id", "number", name=op.f("pk_invoice_line")),
    )
    op.create_index(op.f("ix_invoice_line_month"), "invoice_line", ["month"])
    op.execute(KEEP_INVOICE)
    for table in ("invoice", "invoice_line"):
        op.execute(
            f"CREATE TRIGGER farthing_keep_invoice BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION farthing_keep_invoice()"
        )
    op.execute(
        "CREATE TRIGGER farthing_audit AFTER INSERT OR UPDATE OR DELETE ON invoice "
        "FOR EACH ROW EXECUTE FUNCTION farthing_audit('invoice')"
    )


def downgrade() -> None:
    op.drop_table("invoice_line")
    op.drop_table("invoice")
    op.execute("DROP FUNCTION farthing_keep_invoice()")
    op.drop_column("org", "billing_time_zone")
