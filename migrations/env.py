"""Alembic's entry: runs the migrations on the connection that `migrations` hands over, in its transaction."""

from alembic import context
from sqlalchemy import Connection

from billing.partitions import is_partition
from billing.tables import metadata


def include_name(name: str | None, kind: str, parents: object) -> bool:
    """Leave partitions out of comparisons: they come and go with the days and copy their parent."""
    return not (kind == "table" and name is not None and is_partition(name))


connection = context.config.attributes.get("connection")
if not isinstance(connection, Connection):
    raise RuntimeError("run migrations with migrations.upgrade(url) or migrations.downgrade(url, revision)")
context.configure(connection=connection, target_metadata=metadata, include_name=include_name)
with context.begin_transaction():
    context.run_migrations()
