"""`farthing reconcile`: an upstream's bill beside the ledger. Heavy imports wait, as in cli.py."""

from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.amounts import exact
from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show, warn

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.reconciliation import Difference, Reconciliation


def reconcile(
    bill: Annotated[Path, typer.Argument(metavar="BILL.csv", help="As the upstream exports it.")],
    upstream: Annotated[str, typer.Option(help="Whose bill it is, as the configuration names it.")],
    month: Annotated[
        str | None, typer.Option(help="Only this month (UTC), like 2026-11. Default: the bill's days.")
    ] = None,
    tolerance: Annotated[
        str, typer.Option(help="Share by which the sides may differ, beside what the bill's rounding explains.")
    ] = "0.005",
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=COLUMN,…",
            help="For a CSV that is neither OpenAI's nor Anthropic's export: day, model, and of prompt_tokens, "
            "input_fresh, input_cached, input_cache_write, completion_tokens, cost, currency what it has.",
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="THEIRS=OURS", help="A model that the bill calls otherwise. May be given several times."),
    ] = None,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Compare an upstream's bill with the ledger, day by day and model by model; exit code 1 where they differ."""
    try:
        share = Decimal(tolerance)
        text = bill.read_text(encoding="utf-8-sig")
    except InvalidOperation:
        fail(f"{tolerance!r} is no share; write it like 0.005")
    except OSError as error:
        fail(f"cannot read {bill}: {error.strerror}")
    except UnicodeDecodeError:
        fail(f"cannot read {bill}: it is not UTF-8 text")
    named = _pairs(columns.split(",") if columns else [], "--columns")
    renamed = _pairs(rename or [], "--rename")

    async def work(connection: "AsyncConnection") -> "Reconciliation":
        from billing.bills import read_bill
        from billing.reconciliation import reconcile

        return await reconcile(
            connection, upstream, read_bill(text, named or None), month=month, tolerance=share, names=renamed
        )

    found = in_database(work, database_url, data_dir)
    if as_json:
        import json

        import msgspec

        typer.echo(json.dumps(msgspec.to_builtins(found), indent=2, ensure_ascii=False))
    else:
        _print(found)
    if found.gap is not None:
        warn(found.gap)
    if found.differences:
        raise typer.Exit(1)


def _pairs(given: list[str], option: str) -> dict[str, str]:
    pairs = {}
    for each in given:
        left, equals, right = (part.strip() for part in each.partition("="))
        if not (left and equals and right):
            fail(f"{option}: {each!r} is not like NAME=NAME")
        pairs[left] = right
    return pairs


def _print(found: "Reconciliation") -> None:
    if found.differences:
        show([_row(each) for each in found.differences], False)
    show([_row(each) for each in found.totals], False)
    typer.echo(
        f"{found.upstream}, {found.first_day} to {found.last_day}: {found.compared} days of models compared, "
        f"{len(found.differences)} differences{f'; costs in {found.currency}' if found.currency else ''}."
    )
    if found.unknown:
        typer.echo(f"{found.unknown} attempts have no known cost in the ledger: nobody said what they cost.")


def _row(each: "Difference") -> dict[str, Any]:
    return {
        "day": "total" if each.day is None else each.day.isoformat(),
        "model": each.model or "",
        "what": each.what,
        "bill": exact(each.bill),
        "ledger": exact(each.ledger),
        "difference": exact(each.difference),
    }
