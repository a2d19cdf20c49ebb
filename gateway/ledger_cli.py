"""`farthing ledger …`: what the ledger takes on the disk, and what retention would drop. Heavy imports wait."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.storage import Stored

Days = Annotated[int | None, typer.Option(min=1, help="Kept for so many days.", show_default="for ever")]

app = typer.Typer(help="What the ledger stores, and for how long.", no_args_is_help=True)


@app.command()
def size(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Show the partitions with what they take on the disk, oldest first.

    Rows are what PostgreSQL last estimated; empty where it has not yet.
    """

    async def work(connection: "AsyncConnection") -> "list[Stored]":
        from billing.storage import stored

        return await stored(connection)

    show([_row(each) for each in in_database(work, database_url, data_dir)], as_json)


@app.command()
def retention(
    operations: Days = None,
    payloads: Days = None,
    rollups: Days = None,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Show what would be dropped if the configuration's section retention said so. Nothing is dropped by this."""
    if operations is None and payloads is None and rollups is None:
        fail("say for how many days: --operations, --payloads or --rollups; without a value all is kept")

    async def work(connection: "AsyncConnection") -> "list[Stored]":
        from billing.retention import Keep, expired
        from billing.storage import stored

        keep = Keep(operations=operations, payloads=payloads, rollups=rollups)
        gone = {name for each in await expired(connection, keep) for name in each.names}
        return [each for each in await stored(connection) if each.partition in gone]

    show([_row(each) for each in in_database(work, database_url, data_dir)], as_json)


def _row(each: "Stored") -> dict[str, Any]:
    return {
        "partition": each.partition,
        "day": each.day,
        "rows": each.rows,
        "mib": f"{each.bytes / 2**20:.1f}",
    }
