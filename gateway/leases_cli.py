"""`farthing leases …`: what gateways have taken out of budgets, and freeing it. Heavy imports wait, as in cli.py."""

from typing import TYPE_CHECKING, Annotated

import typer

from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.lost_replicas import ReplicaLeases

WARNING = """\
{replica} holds this for calls it was serving when it ended. Start a gateway on its data folder, and it copies what was
spooled there and frees the rest by itself: that is the way wherever the folder can still be read.

Free its leases only when its spool is lost. What was spooled there and never copied will then be charged to nobody.
If the spool turns up later and is copied all the same, its charges count in addition, and a budget may be over.
"""

app = typer.Typer(help="What gateways have taken out of budgets in advance, and how to free it.", no_args_is_help=True)


@app.command("list")
def list_(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List the gateway processes that have leases, and how much they hold."""

    async def work(connection: "AsyncConnection") -> "list[ReplicaLeases]":
        from billing.lost_replicas import list_leases

        return await list_leases(connection)

    rows = [
        {
            "replica": found.replica,
            "alive": found.alive,
            "heard_of": found.renewed_at,
            "leases": found.leases,
            "held": ", ".join(f"{amount:f} {unit}" for unit, amount in sorted(found.held.items())) or None,
        }
        for found in in_database(work, database_url, data_dir)
    ]
    show(rows, as_json)


@app.command()
def free(
    replica: Annotated[str, typer.Argument(help="Its name, as `farthing leases list` shows it.")],
    yes: Annotated[bool, typer.Option("--yes", help="Its spool is lost: do not ask.")] = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Free what a gateway that is gone for good has leased. Only when its spool can no longer be read."""
    if not yes:
        if replica not in in_database(_replicas, database_url, data_dir):
            fail(f"{replica!r} has no lease; `farthing leases list` shows who has")
        typer.echo(WARNING.format(replica=replica))
        typer.confirm("Is its spool lost, and shall its leases be freed?", abort=True)

    async def work(connection: "AsyncConnection") -> int:
        from billing.lost_replicas import free_leases

        return await free_leases(connection, replica)

    freed = in_database(work, database_url, data_dir)
    typer.echo(f"freed {freed} lease{'' if freed == 1 else 's'} of {replica}")


async def _replicas(connection: "AsyncConnection") -> set[str]:
    from billing.lost_replicas import list_leases

    return {found.replica for found in await list_leases(connection)}
