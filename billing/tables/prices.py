"""The price book: one immutable row a version; what a later correction adds; what devices cost."""

from sqlalchemy import (
    CheckConstraint,
    Column,
    Index,
    Integer,
    Numeric,
    Table,
    Text,
    Uuid,
    func,
    text,
)

from billing.records import TOKEN_CLASSES
from billing.tables.base import Timestamp, id_column, metadata

# Of two versions that begin at the same moment the later one entered (the larger UUIDv7) holds: a correction.
price_version = Table(
    "price_version",
    metadata,
    id_column(),
    Column("book", Text, nullable=False, comment="sale: what the user is billed; cost: what the operator pays"),
    Column("model", Text, nullable=False, comment="empty: every model, of an override; or a device's price"),
    Column("upstream", Text, nullable=False, server_default="", comment="empty on a sale price"),
    Column("tier", Text, nullable=False, server_default="standard", comment="empty: every tier, of an override"),
    Column("scope_kind", Text, nullable=False, server_default="", comment="whose override it is; empty: list price"),
    Column("scope_id", Text, nullable=False, server_default=""),
    Column("effective_at", Timestamp, nullable=False, server_default=func.now()),
    Column("currency", Text, nullable=False),
    *(Column(name, Numeric, nullable=True, comment="per million tokens") for name in TOKEN_CLASSES),
    Column("per_request", Numeric, nullable=True, comment="for each answered attempt; NULL: no such part"),
    Column("per_image", Numeric, nullable=True, comment="for each image of the prompt; NULL: no such part"),
    Column("per_cached_answer", Numeric, nullable=True, comment="for each from the response cache; NULL: nothing"),
    Column("device_hour", Numeric, nullable=True, comment="price of one device for an hour, on a cost by device time"),
    Column("factor", Numeric, nullable=True, comment="an override: times the list price"),
    Column("source", Text, nullable=False, server_default="configuration", comment="who entered it"),
    Index(None, "book", "model", "upstream", "tier", "effective_at"),
    CheckConstraint("book IN ('sale', 'cost')", name="book"),
    CheckConstraint("tier IN ('', 'standard', 'batch', 'priority')", name="tier"),
    CheckConstraint("scope_kind IN ('', 'org', 'team', 'key')", name="scope_kind"),
    CheckConstraint("(scope_kind = '') = (scope_id = '')", name="scope_is_whole"),
    CheckConstraint("factor IS NULL OR scope_kind <> ''", name="factor_of_an_override"),
    CheckConstraint("source IN ('configuration', 'operator')", name="source"),
)

# Append-only: what a corrected price changes about an attempt. Rows of one attempt add up.
adjustment = Table(
    "adjustment",
    metadata,
    id_column(),
    Column("operation_id", Uuid, nullable=False),
    Column("number", Integer, nullable=False, comment="of the attempt"),
    Column("started_at", Timestamp, nullable=False, comment="of the operation"),
    Column("made_at", Timestamp, nullable=False, server_default=func.now()),
    Column("currency", Text, nullable=False),
    Column("billed_delta", Numeric, nullable=True, comment="NULL: no change; what was unknown before counts as 0"),
    Column("cost_delta", Numeric, nullable=True, comment="likewise"),
    *(
        Column(f"{name}_{end}", Uuid, nullable=True)
        for name in ("price_version", "override", "cost_version")
        for end in ("from", "to")
    ),
    Column("reason", Text, nullable=False),
    Column("actor", Text, nullable=False),
    CheckConstraint("billed_delta IS NOT NULL OR cost_delta IS NOT NULL", name="changes_something"),
    Index(None, "operation_id", "number"),
    Index(None, "started_at"),
)

# What a device did in an hour, over all engine processes that ran as this upstream. wall = busy + idle.
device_hour = Table(
    "device_hour",
    metadata,
    Column("upstream", Text, primary_key=True),
    Column("starts_at", Timestamp, primary_key=True, comment="of a UTC hour"),
    Column("currency", Text, primary_key=True),
    *(Column(f"{name}_seconds", Numeric, nullable=False) for name in ("wall", "busy", "idle")),
    Column("busy_cost", Numeric, nullable=True, comment="NULL: some of it had no price"),
    Column("idle_cost", Numeric, nullable=True, comment="likewise"),
    CheckConstraint("busy_seconds >= 0 AND idle_seconds >= 0", name="seconds_not_negative"),
)

# How far an engine process's own account has been taken over into device_hour.
device_account = Table(
    "device_account",
    metadata,
    Column("instance", Text, primary_key=True, comment="another one after each start of the engine"),
    Column("upstream", Text, nullable=False, comment="the one it counts for, where two lead to it"),
    Column("wall_seconds", Numeric, nullable=False, server_default=text("0")),
    Column("idle_seconds", Numeric, nullable=False, server_default=text("0")),
    Column("read_at", Timestamp, nullable=False, server_default=func.now()),
)
