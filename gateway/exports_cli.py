"""`farthing export …`: usage and costs as files for other programs. Heavy imports wait, as in cli.py."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gateway.command_line import DatabaseUrl, DataDir, in_database
from gateway.usage_options import (
    From,
    Key,
    Last,
    Model,
    Org,
    Tag,
    Team,
    TimeZone,
    To,
    User,
    Wanted,
    filters,
    period,
)

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.filters import Filters

Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write it; - is standard output.")]
FormatOption = Annotated[
    Literal["csv", "parquet"] | None, typer.Option("--format", help="Default: what FILE ends with, else csv.")
]

app = typer.Typer(help="Write usage and costs to files: CSV or Parquet.", no_args_is_help=True)


@app.command()
def usage(
    out: Out,
    format: FormatOption = None,
    last: Last = None,
    first: From = None,
    to: To = None,
    time_zone: TimeZone = "UTC",
    org: Org = None,
    team: Team = None,
    user: User = None,
    key: Key = None,
    model: Model = None,
    tag: Tag = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Every operation as a row: who, model, the five token classes, billed, cost, margin, timings.

    In CSV, text that a spreadsheet would run as a formula has an apostrophe before it.
    """
    start, end = period(last, first, to, time_zone)
    chosen = _format(format, out)

    def pieces(connection: "AsyncConnection", which: "Filters") -> AsyncIterator[bytes]:
        from billing.exports import export_usage

        return export_usage(connection, start, end, which, chosen)

    _write(pieces, Wanted(org, team, user, key, model, tag), out, database_url, data_dir)


@app.command()
def focus(
    out: Out,
    view: Annotated[
        Literal["billed", "cost"], typer.Option(help="billed: what users were charged. cost: what you paid.")
    ] = "billed",
    format: FormatOption = None,
    provider: Annotated[str, typer.Option(help="Your name in it.")] = "Farthing",
    last: Last = None,
    first: From = None,
    to: To = None,
    org: Org = None,
    team: Team = None,
    user: User = None,
    key: Key = None,
    model: Model = None,
    tag: Tag = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Costs in the FOCUS format (FinOps Open Cost and Usage Specification 1.4), a row a UTC day and kind of unit.

    Operations whose charge is unknown are in no row; `farthing usage` counts them.
    """
    start, end = period(last, first, to, "UTC")
    chosen = _format(format, out)

    def pieces(connection: "AsyncConnection", which: "Filters") -> AsyncIterator[bytes]:
        from billing.exports import export_focus

        return export_focus(connection, view, start, end, which, chosen, provider)

    _write(pieces, Wanted(org, team, user, key, model, tag), out, database_url, data_dir)


def _format(given: Literal["csv", "parquet"] | None, out: Path) -> Literal["csv", "parquet"]:
    return given or ("parquet" if out.suffix == ".parquet" else "csv")


def _write(
    pieces: "Callable[[AsyncConnection, Filters], AsyncIterator[bytes]]",
    wanted: Wanted,
    out: Path,
    database_url: str | None,
    data_dir: Path | None,
) -> None:
    """Beside the file first, and in its place when it is whole: what was there before outlives a failure."""
    import sys

    from gateway.command_line import fail

    async def to_standard_output(connection: "AsyncConnection") -> None:
        async for piece in pieces(connection, await filters(connection, wanted)):
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()

    async def to_file(connection: "AsyncConnection") -> int:
        part = out.with_name(out.name + ".part")
        size = 0
        try:
            with part.open("wb") as file:
                async for piece in pieces(connection, await filters(connection, wanted)):
                    size += file.write(piece)
            part.replace(out)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return size

    if str(out) == "-":
        in_database(to_standard_output, database_url, data_dir)
        return
    try:
        size = in_database(to_file, database_url, data_dir)
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror}")
    typer.echo(f"wrote {out} ({size:,} bytes)")
