"""What all tables share: the metadata with its naming of constraints, and common columns."""

from sqlalchemy import Column, DateTime, MetaData, Uuid, func

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


def id_column() -> Column[object]:
    """A UUID as primary key."""
    return Column("id", Uuid, primary_key=True)


def created() -> Column[object]:
    """When the row was made."""
    return Column("created_at", Timestamp, nullable=False, server_default=func.now())
