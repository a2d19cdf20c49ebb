"""`models`: see, fetch, check and delete the models of the catalogue."""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from engine import catalog
from engine.catalog import CatalogError

app = typer.Typer(no_args_is_help=True, help="See, fetch, check and delete models.")

Names = Annotated[list[str], typer.Argument(metavar="NAME", help="Names from `models list`.", show_default=False)]
SomeNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="Names from `models list`; all fetched ones if none.", show_default=False),
]


@app.command("list")
def list_models() -> None:
    """Show the models that can be named, and which of them are on this machine."""
    table = Table(box=None, pad_edge=False)
    for heading in ("Name", "Architecture", "Parameters", "Size", "Licence", "Here"):
        table.add_column(heading, justify="right" if heading in ("Parameters", "Size") else "left")
    for entry in catalog.entries().values():
        here = "yes" if entry.present else "no"
        row = (entry.name, entry.architecture, entry.parameters, megabytes(entry.size), entry.licence, here)
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console.width = 100  # a pipe has no width; 80 columns would cut the names
    console.print(table)
    console.print(f"\nFetched models are kept in {catalog.models_folder()}", soft_wrap=True)


@app.command()
def pull(names: Names) -> None:
    """Fetch models. What an interrupted pull got is kept: run it again to go on."""
    for name in names:
        try:
            path = pull_with_progress(name)
        except CatalogError as error:
            fail(error)
        typer.echo(f"{name} is ready: {path}")


@app.command()
def verify(names: SomeNames = None) -> None:
    """Hash fetched models again and compare with what they should be."""
    failed = False
    for name in names or [entry.name for entry in catalog.entries().values() if entry.present]:
        try:
            catalog.verify(name)
            typer.echo(f"{name}: whole")
        except CatalogError as error:
            failed = True
            typer.echo(f"{name}: {error}", err=True)
    if failed:
        raise typer.Exit(1)


@app.command()
def remove(names: Names) -> None:
    """Delete fetched models, and what interrupted pulls left of them."""
    for name in names:
        try:
            removed = catalog.remove(name)
        except CatalogError as error:
            fail(error)
        typer.echo(f"{name} is removed" if removed else f"{name} was not on this machine")


def fail(error: CatalogError) -> NoReturn:
    """Say what is wrong and end with status 1."""
    typer.echo(f"Error: {error}", err=True)
    raise typer.Exit(1) from error


def pull_with_progress(name: str) -> Path:
    """Pull a model with a bar on a terminal, and a line every tenth of the way elsewhere. Raises CatalogError."""
    if catalog.find(name).present:
        return catalog.pull(name)
    if not sys.stderr.isatty():
        return catalog.pull(name, Lines(name))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=catalog.find(name).size)
        return catalog.pull(name, lambda done, total: bar.update(task, completed=done, total=total))


class Lines:
    """Progress as plain lines on stderr, for logs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tenths = -1

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // total
        if tenths > self.tenths:
            self.tenths = tenths
            typer.echo(f"{self.name}: {megabytes(done)} of {megabytes(total)}", err=True)


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
