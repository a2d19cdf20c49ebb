"""What the commands share: ending with a sentence, finding the database, showing rows. Heavy imports wait."""

import asyncio
import getpass
import json
import os
import re
from collections.abc import Awaitable, Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from sqlalchemy import URL
    from sqlalchemy.ext.asyncio import AsyncConnection

T = TypeVar("T")

DatabaseUrl = Annotated[
    str | None, typer.Option(envvar="FARTHING_DATABASE_URL", help="Default: that of the running `farthing up`.")
]
DataDir = Annotated[
    Path | None, typer.Option(help="Whose `farthing up` (default: $FARTHING_DATA, else ~/.local/share/farthing).")
]
Json = Annotated[bool, typer.Option("--json", help="JSON for scripts.")]


class AmountCommand(TyperCommand):
    """Takes -5 for an amount, not for an option; what is no number and no option is still called one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.ignore_unknown_options = any(_NEGATIVE.fullmatch(word) for word in args)
        return super().parse_args(ctx, args)


_NEGATIVE = re.compile(r"-[\d.]+")


def fail(message: str) -> NoReturn:
    """End with one sentence on stderr and exit code 1."""
    typer.echo(f"farthing: {message}", err=True)
    raise typer.Exit(1)


def warn(message: object) -> None:
    """One sentence on stderr; the command goes on."""
    typer.echo(f"farthing: {message}", err=True)


def find_database(database_url: str | None, data_dir: Path | None) -> "URL":
    """The database named on the command line, else the one in up.json."""
    from gateway.connect import DatabaseUnavailableError, asyncpg_url
    from gateway.upfile import UpFile, default_data_dir

    if database_url is None:
        folder = data_dir or default_data_dir()
        last = UpFile.read(folder)
        if last is None:
            fail(f"no database: {folder} has no up.json. Run `farthing up` or give --database-url")
        database_url = last.database_url
    try:
        return asyncpg_url(database_url)
    except DatabaseUnavailableError as error:
        fail(str(error))


def in_database(
    work: "Callable[[AsyncConnection], Awaitable[T]]", database_url: str | None, data_dir: Path | None
) -> T:
    """What `work` returns from inside one transaction; a failure it can name ends the command.

    What it changes is noted in the audit log as this user's doing.
    """
    from sqlalchemy.exc import ProgrammingError

    from billing.audit import act_as
    from gateway.connect import DatabaseUnavailableError, transaction

    url = find_database(database_url, data_dir)

    async def run() -> T:
        async with transaction(url) as connection:
            await act_as(connection, f"shell:{_os_user()}")
            return await work(connection)

    try:
        return asyncio.run(run())
    except DatabaseUnavailableError as error:
        fail(f"{error}. Is `farthing up` running?" if database_url is None else str(error))
    except ProgrammingError as error:
        if getattr(error.orig, "sqlstate", None) not in _OTHER_SCHEMA:
            raise
        fail("the schema in the database is of another version; `farthing migrate` or a new `farthing up` updates it")
    except ValueError as error:  # how billing refuses a bad name, window or amount
        fail(str(error))


_OTHER_SCHEMA = ("42703", "42P01")
"""SQLSTATE of a column or a table that is not there."""


def _os_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, a number without a name
        return str(os.getuid())


def show(rows: list[dict[str, Any]], as_json: bool, lines: bool = False) -> None:
    """Rows as a table for people (with `lines` between them), or as JSON with every value a string, number or null."""
    if as_json:
        typer.echo(json.dumps(rows, default=_plain, indent=2))
        return
    if not rows:
        typer.echo("none")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=lines)
    for column in rows[0]:
        numbers = all(_NUMBER.fullmatch("" if row[column] is None else _plain(row[column])) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(Text("" if value is None else _plain(value)) for value in row.values()))
    # An id or a key cut off at a narrow terminal's edge would be useless: let the terminal wrap the lines.
    Console(width=Console(width=10_000).measure(table).maximum).print(table, soft_wrap=True)


_NUMBER = re.compile(r"(-?[\d,]+(\.\d+)?%?|unknown)?")
"""What lines up at its right end."""


def _plain(value: object) -> str:
    if isinstance(value, Decimal):
        return f"{value:f}"  # never 1E-9
    return value.isoformat(timespec="seconds") if isinstance(value, datetime) else str(value)
