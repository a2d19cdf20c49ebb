"""`farthing export …`: usage and costs as files for other programs. Heavy imports wait, as in cli.py."""

from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal

import typer

from gateway import usage_options
from gateway.command_line import DatabaseUrl, DataDir, fail, in_database, warn
from gateway.usage_options import Wanted, filters, period

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.filters import Filters
    from billing.gaps import Gap

Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write it; - is standard output.")]
FormatOption = Annotated[
    Literal["csv", "parquet"] | None, typer.Option("--format", help="Default: what FILE ends with, else csv.")
]

app = typer.Typer(help="Write usage and costs to files: CSV or Parquet.", no_args_is_help=True)


@app.command()
def usage(
    out: Out,
    format: FormatOption = None,
    last: usage_options.Last = None,
    first: usage_options.From = None,
    to: usage_options.To = None,
    time_zone: usage_options.TimeZone = "UTC",
    org: usage_options.Org = None,
    team: usage_options.Team = None,
    user: usage_options.User = None,
    key: usage_options.Key = None,
    model: usage_options.Model = None,
    tag: usage_options.Tag = None,
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

    _write(pieces, (start, end), Wanted(org, team, user, key, model, tag), out, database_url, data_dir)


@app.command()
def focus(
    out: Out,
    view: Annotated[
        Literal["billed", "cost"], typer.Option(help="billed: what users were charged. cost: what you paid.")
    ] = "billed",
    format: FormatOption = None,
    provider: Annotated[str, typer.Option(help="Your name in it.")] = "Farthing",
    last: usage_options.Last = None,
    first: usage_options.From = None,
    to: usage_options.To = None,
    org: usage_options.Org = None,
    team: usage_options.Team = None,
    user: usage_options.User = None,
    key: usage_options.Key = None,
    model: usage_options.Model = None,
    tag: usage_options.Tag = None,
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

    _write(pieces, (start, end), Wanted(org, team, user, key, model, tag), out, database_url, data_dir)


def _format(given: Literal["csv", "parquet"] | None, out: Path) -> Literal["csv", "parquet"]:
    return given or ("parquet" if out.suffix == ".parquet" else "csv")


def _write(
    pieces: "Callable[[AsyncConnection, Filters], AsyncIterator[bytes]]",
    within: tuple[datetime, datetime],
    wanted: Wanted,
    out: Path,
    database_url: str | None,
    data_dir: Path | None,
) -> None:
    """Beside the file first, and in its place when it is whole: what was there before outlives a failure."""
    import sys

    async def write_to(connection: "AsyncConnection", file: IO[bytes]) -> "tuple[int, Gap | None]":
        from billing.gaps import gap

        which = await filters(connection, wanted)
        lacks = await gap(connection, *within, which)
        size = 0
        async for piece in pieces(connection, which):
            size += file.write(piece)
        return size, lacks

    async def to_standard_output(connection: "AsyncConnection") -> "tuple[int, Gap | None]":
        written = await write_to(connection, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return written

    async def to_file(connection: "AsyncConnection") -> "tuple[int, Gap | None]":
        part = out.with_name(out.name + ".part")
        try:
            with part.open("wb") as file:
                written = await write_to(connection, file)
            part.replace(out)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return written

    to_terminal = str(out) == "-"
    try:
        size, lacks = in_database(to_standard_output if to_terminal else to_file, database_url, data_dir)
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror}")
    if not to_terminal:
        typer.echo(f"wrote {out} ({size:,} bytes)")
    if lacks is not None:
        warn(lacks)
