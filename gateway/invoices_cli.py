"""`farthing invoices …`: a month's charges as an invoice. Heavy imports wait, as in cli.py."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.amounts import exact
from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from uuid import UUID

    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.invoices import Invoice

Org = Annotated[str, typer.Option(help="Which organisation.")]
Which = Annotated[str, typer.Argument(metavar="INVOICE", help="Its number, as `farthing invoices list` shows it.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Default: invoice-NUMBER.pdf (or .csv) in this folder."),
]

app = typer.Typer(help="Issue, list, print and void monthly invoices.", no_args_is_help=True)


@app.command()
def create(
    month: Annotated[str, typer.Option(help="A month that is over, like 2026-11.")],
    org: Org = "default",
    team: Annotated[str | None, typer.Option(help="Only this team of it.")] = None,
    currency: Annotated[str | None, typer.Option(help="Where the month was charged in several.")] = None,
    issuer: Annotated[
        str, typer.Option(envvar="FARTHING_INVOICE_ISSUER", help="Your name and address; \\n begins a new line.")
    ] = "",
    bill_to: Annotated[str, typer.Option(help="The customer's address, below its name; likewise.")] = "",
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Issue the invoice of a month. It is never changed: `void` takes it back, and the month can be invoiced anew."""

    async def work(connection: "AsyncConnection") -> "Invoice":
        from billing import people
        from billing.invoices import create_invoice

        org_id = await _org_id(connection, org)
        team_id = None
        if team is not None:
            team_id = await people.find_team(connection, org_id, team)
            if team_id is None:
                raise ValueError(f"there is no team {team!r} in the organisation {org!r}")
        return await create_invoice(
            connection,
            org_id,
            month,
            team_id=team_id,
            currency=currency,
            issuer=issuer.replace("\\n", "\n"),
            bill_to=bill_to.replace("\\n", "\n"),
        )

    _show(in_database(work, database_url, data_dir), as_json)


@app.command("list")
def list_(
    org: Annotated[str | None, typer.Option(help="Only of this organisation.")] = None,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """List invoices, newest first."""

    async def work(connection: "AsyncConnection") -> "list[Invoice]":
        from billing.invoices import list_invoices

        return await list_invoices(connection, None if org is None else await _org_id(connection, org))

    show([_summary(each) for each in in_database(work, database_url, data_dir)], as_json)


@app.command("show")
def show_(which: Which, as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Show an invoice with its lines."""
    _show(_find(which, database_url, data_dir), as_json)


@app.command()
def pdf(which: Which, out: Out = None, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Write an invoice as a PDF."""
    found = _find(which, database_url, data_dir)
    from billing.invoice_pdf import invoice_pdf

    _write(out or Path(f"invoice-{found.label}.pdf"), invoice_pdf(found))


@app.command()
def csv(which: Which, out: Out = None, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """Write an invoice's lines as CSV, each with what it is made of."""
    found = _find(which, database_url, data_dir)
    from billing.invoice_csv import invoice_csv

    _write(out or Path(f"invoice-{found.label}.csv"), invoice_csv(found))


@app.command()
def void(
    which: Which,
    reason: Annotated[str, typer.Option(help="Why; it is kept with the invoice.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Take an invoice back. Its number stays taken; its month can be invoiced anew."""

    async def work(connection: "AsyncConnection") -> "Invoice":
        from billing.invoices import find_invoice, void_invoice

        found = await find_invoice(connection, which)
        if found is None:
            raise ValueError(f"there is no invoice {which!r}; `farthing invoices list` shows all")
        return await void_invoice(connection, found.id, reason)

    found = in_database(work, database_url, data_dir)
    typer.echo(f"invoice {found.label} is void; {found.month} can be invoiced anew")


@app.command("time-zone")
def time_zone(
    zone: Annotated[str, typer.Argument(help="Like Asia/Shanghai.")],
    org: Org = "default",
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """On whose clock an organisation's months begin; before its first invoice."""

    async def work(connection: "AsyncConnection") -> None:
        from billing.invoices import set_billing_time_zone

        await set_billing_time_zone(connection, await _org_id(connection, org), zone)

    in_database(work, database_url, data_dir)
    typer.echo(f"{org}: months begin at midnight in {zone}")


async def _org_id(connection: "AsyncConnection", name: str) -> "UUID":
    from billing import people

    found = await people.find_org(connection, name)
    if found is None:
        raise ValueError(f"there is no organisation {name!r}")
    return found


def _find(which: str, database_url: str | None, data_dir: Path | None) -> "Invoice":
    async def work(connection: "AsyncConnection") -> "Invoice | None":
        from billing.invoices import find_invoice

        return await find_invoice(connection, which)

    found = in_database(work, database_url, data_dir)
    if found is None:
        fail(f"there is no invoice {which!r}; `farthing invoices list` shows all")
    return found


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")
    typer.echo(f"wrote {path}")


def _summary(found: "Invoice") -> dict[str, Any]:
    return {
        "invoice": found.label,
        "customer": found.customer,
        "month": found.month,
        "total": f"{found.total:f}",
        "currency": found.currency,
        "status": "issued" if found.voided_at is None else "void",
        "issued_at": found.issued_at,
        "void_reason": found.void_reason,
    }


def _show(found: "Invoice", as_json: bool) -> None:
    if as_json:
        import json

        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2, ensure_ascii=False))
        return
    state = "" if found.voided_at is None else f", VOID: {found.void_reason}"
    typer.echo(f"Invoice {found.label} to {found.customer} for {found.month} ({found.time_zone}){state}")
    rows = [
        {
            "line": line.number,
            "description": line.description,
            "quantity": f"{exact(line.quantity)} {line.unit}",
            "unit_price": "" if line.unit_price is None else exact(line.unit_price),
            "per": "" if line.unit_price is None else f"{line.per:,}",
            "exact_amount": exact(line.exact_amount),
            "amount": f"{line.amount:f}",
        }
        for line in found.lines
    ]
    show(rows, as_json)
    typer.echo(f"Total {found.total:f} {found.currency}, taxes not included.")
    if found.unknown:
        typer.echo(f"{found.unknown:,} operations of the month have no known charge and are on no line.")
