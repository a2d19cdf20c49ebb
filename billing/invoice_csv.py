"""An invoice's lines as CSV, for a bookkeeper's program: each line with what it is made of, to the last digit."""

from billing.csv_text import csv_bytes
from billing.invoices import Invoice

COLUMNS = (
    "invoice", "status", "customer", "month", "currency", "line", "usage_month", "description", "model", "tier", "part",
    "price_version", "override", "quantity", "unit", "unit_price", "per", "exact_amount", "amount",
)  # fmt: skip


def invoice_csv(invoice: Invoice) -> bytes:
    """One row a line; the amounts add up to the invoice's total."""
    status = "issued" if invoice.voided_at is None else "void"
    rows = [
        [
            invoice.label,
            status,
            invoice.customer,
            invoice.month,
            invoice.currency,
            line.number,
            line.month,
            line.description,
            line.model,
            line.tier,
            line.part,
            None if line.price_version_id is None else str(line.price_version_id),
            None if line.override_id is None else str(line.override_id),
            line.quantity,
            line.unit,
            line.unit_price,
            line.per,
            line.exact_amount,
            line.amount,
        ]
        for line in invoice.lines
    ]
    return csv_bytes([COLUMNS, *rows])
