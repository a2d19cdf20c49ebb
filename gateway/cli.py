"""The `farthing` command. Imports wait until a command needs them, so that `farthing --help` is quick."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from gateway import (
    admins_cli,
    alerts_cli,
    audit_cli,
    budgets_cli,
    check_cli,
    exports_cli,
    invoices_cli,
    keys_cli,
    leases_cli,
    ledger_cli,
    limits_cli,
    margins_cli,
    people_cli,
    prices_cli,
    reconcile_cli,
    usage_cli,
    wallets_cli,
)
from gateway.command_line import DatabaseUrl, DataDir, fail, find_database

app = typer.Typer(
    name="farthing",
    help="An LLM gateway with its own inference engine that knows what every token cost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(keys_cli.app, name="keys")
app.add_typer(budgets_cli.app, name="budgets")
app.add_typer(limits_cli.app, name="limits")
app.add_typer(leases_cli.app, name="leases")
app.add_typer(wallets_cli.app, name="wallets")
app.add_typer(alerts_cli.app, name="alerts")
app.add_typer(ledger_cli.app, name="ledger")
app.add_typer(people_cli.orgs, name="orgs")
app.add_typer(people_cli.teams, name="teams")
app.add_typer(people_cli.users, name="users")
app.add_typer(admins_cli.app, name="admins")
app.add_typer(audit_cli.app, name="audit")
app.add_typer(prices_cli.app, name="prices")
app.add_typer(usage_cli.app, name="usage")
app.add_typer(exports_cli.app, name="export")
app.add_typer(invoices_cli.app, name="invoices")
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def main() -> None:
    app()


@app.command()
def up(
    demo: Annotated[bool, typer.Option("--demo", help="Two smaller models: quick to fetch and to answer.")] = False,
    small: Annotated[
        str | None, typer.Option(help="Small model: a name from `farthing models list`, or a path.")
    ] = None,
    large: Annotated[str | None, typer.Option(help="Large model, likewise.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway, on 127.0.0.1.")] = 8000,
    data_dir: Annotated[
        Path | None, typer.Option(help="Data folder (default: $FARTHING_DATA, else ~/.local/share/farthing).")
    ] = None,
    database_url: Annotated[str | None, typer.Option(help="Use this PostgreSQL, not the embedded one.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "int8", "int4"] | None,
        typer.Option(
            help="What the engine keeps weights in. Default: int8 where the CPU has AVX512-VNNI or AMX, else bfloat16."
        ),
    ] = None,
    no_engine: Annotated[
        bool, typer.Option("--no-engine", help="Start no engine: farthing.toml says where the models are.")
    ] = False,
) -> None:
    """Start PostgreSQL, the engine and the gateway; print how to use them; Ctrl-C stops all of it."""
    from gateway import up as command
    from gateway.connect import DatabaseUnavailableError
    from gateway.datadir import DataDirError
    from gateway.postgres import PostgresFailedError
    from gateway.supervisor import PartDiedError
    from gateway.upfile import default_data_dir

    options = command.Options(
        data_dir=data_dir or default_data_dir(),
        port=port,
        small=small,
        large=large,
        demo=demo,
        database_url=database_url,
        dtype=dtype,
        engine=not no_engine,
    )
    try:
        command.up(options)
    except (command.UpError, DatabaseUnavailableError, DataDirError, PostgresFailedError, PartDiedError) as error:
        fail(str(error))


@app.command(context_settings=PASS_ON)
def test(context: typer.Context) -> None:
    """Run every check and test of a clone; further arguments go to pytest."""
    from gateway.checks import run_all

    raise typer.Exit(run_all(context.args))


@app.command(context_settings=PASS_ON)
def engine(context: typer.Context) -> None:
    """Serve models without a gateway: `farthing engine MODEL…` (see `farthing engine --help`)."""
    run_module("engine", "serve", *context.args)


@app.command(context_settings=PASS_ON)
def models(context: typer.Context) -> None:
    """List, pull, verify and remove models (see `farthing models --help`)."""
    run_module("engine", "models", *context.args)


@app.command(context_settings=PASS_ON)
def gateway(context: typer.Context) -> None:
    """Run the gateway alone (see `farthing gateway --help`)."""
    run_module("gateway", *context.args)


@app.command()
def migrate(database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Bring the database schema up to date."""
    os.environ["FARTHING_DATABASE_URL"] = find_database(database_url, data_dir).render_as_string(hide_password=False)
    run_module("migrations")


app.command()(check_cli.check)
app.command()(margins_cli.margins)
app.command()(margins_cli.devices)
app.command()(reconcile_cli.reconcile)


def run_module(module: str, *arguments: str) -> NoReturn:
    """Become `python -m module`; `-P` keeps a folder of the same name where we stand from being taken for it."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])  # noqa: S606
