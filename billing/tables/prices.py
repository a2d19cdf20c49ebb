"""The price book: one immutable row a version."""

from sqlalchemy import (
    CheckConstraint,
    Column,
    Numeric,
    Table,
    Text,
    UniqueConstraint,
    func,
)

from billing.records import TOKEN_CLASSES
from billing.tables.base import Timestamp, id_column, metadata

price_version = Table(
    "price_version",
    metadata,
    id_column(),
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
