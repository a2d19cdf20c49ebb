"""`farthing usage …`: who cost what, with what margin; what the month would be. Heavy imports wait, as in cli.py."""

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from gateway import usage_options
from gateway.amounts import money, percent
from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show, warn
from gateway.usage_options import Wanted, filters, period

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.breakdown import UsageRow
    from billing.explanation import Explanation
    from billing.forecast import Forecast, Range
    from billing.gaps import Gap

app = typer.Typer(help="Who cost what, with what margin; what the month would be; why one call cost what it did.")


@app.callback(invoke_without_command=True)
def usage(
    context: typer.Context,
    by: Annotated[
        str, typer.Option(help="user, team, org, key, model, day, hour or tag:NAME; several with commas.")
    ] = "user",
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
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Who cost what: operations, tokens, billed, cost and margin, by whatever is asked for.

    Amounts that are unknown are counted beside the sums, and are in none of them.
    """
    if context.invoked_subcommand is not None:
        return
    start, end = period(last, first, to, time_zone)
    dimensions = [each.strip() for each in by.split(",") if each.strip()]
    wanted = Wanted(org, team, user, key, model, tag)

    async def work(connection: "AsyncConnection") -> "tuple[list[UsageRow], dict[tuple[str, str], str], Gap | None]":
        from billing.breakdown import usage_by, usage_gap
        from gateway.scope_names import scope_names

        which = await filters(connection, wanted)
        rows = await usage_by(connection, dimensions, start, end, which, time_zone)
        lacks = await usage_gap(connection, dimensions, start, end, which)
        return rows, await scope_names(connection, _namesakes(rows)), lacks

    rows, names, lacks = in_database(work, database_url, data_dir)
    if as_json:
        show([_full(row) for row in rows], as_json)
    else:
        show(list(_table(rows, dimensions, names)), as_json)
    if lacks is not None:
        warn(lacks)


@app.command()
def forecast(
    time_zone: usage_options.TimeZone = "UTC",
    org: usage_options.Org = None,
    team: usage_options.Team = None,
    user: usage_options.User = None,
    key: usage_options.Key = None,
    model: usage_options.Model = None,
    tag: usage_options.Tag = None,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """What this month would come to, with a range: so far, and what such weekdays brought in the last four weeks."""
    wanted = Wanted(org, team, user, key, model, tag)

    async def work(connection: "AsyncConnection") -> "list[Forecast]":
        from billing.forecast import forecast_month

        return await forecast_month(connection, await filters(connection, wanted), time_zone)

    found = in_database(work, database_url, data_dir)
    amount = str if as_json else money
    show([row for each in found for row in _ranges(each, amount)], as_json)
    if not as_json:
        for each in found:
            typer.echo(_basis(each))


@app.command()
def explain(
    trace_id: Annotated[UUID, typer.Argument(metavar="TRACE_ID", help="The x-farthing-trace-id of a response.")],
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Why one call cost what it did: its route, its attempts, each price times each count, every digit."""

    async def work(connection: "AsyncConnection") -> "Explanation | None":
        from billing.explanation import explain as explanation

        return await explanation(connection, trace_id)

    found = in_database(work, database_url, data_dir)
    if found is None:
        fail(f"there is no operation {trace_id}; it may be a few seconds until it is in the database")
    from gateway.explained import as_lines, as_object

    if as_json:
        import json

        typer.echo(json.dumps(as_object(found), indent=2, ensure_ascii=False))
    else:
        typer.echo("\n".join(as_lines(found)))


def _full(row: "UsageRow") -> dict[str, Any]:
    import msgspec

    counts = msgspec.structs.asdict(row.tokens)
    names = ("operations", "failed", "refused", "cached_answers", "saved_prompt_tokens", "saved_completion_tokens")
    amounts = ("billed", "cost", "margin", "billed_adjustment", "cost_adjustment", "cached_answers_saved")
    return {
        **row.by,
        **{f"{name}_id": identifier for name, identifier in row.ids.items()},
        "currency": row.currency,
        **{name: getattr(row, name) for name in names},
        **counts,
        **{name: None if (amount := getattr(row, name)) is None else f"{amount:f}" for name in amounts},
        "billed_unknown": row.billed_unknown,
        "cost_unknown": row.cost_unknown,
        "cached_answers_saved_unknown": row.cached_answers_saved_unknown,
    }


def _namesakes(rows: "Sequence[UsageRow]") -> Iterable[tuple[str, str]]:
    """(dimension, id) of those that share their name with another, like users of two organisations."""
    seen: dict[tuple[str, str | None], set[str]] = {}
    for row in rows:
        for dimension, identifier in row.ids.items():
            if identifier is not None:
                seen.setdefault((dimension, row.by[dimension]), set()).add(identifier)
    return [(dimension, each) for (dimension, _), ids in seen.items() if len(ids) > 1 for each in ids]


def _table(
    rows: "Sequence[UsageRow]", dimensions: Sequence[str], names: dict[tuple[str, str], str]
) -> Iterable[dict[str, Any]]:
    """With a total for each currency; columns that say nothing in any row are left out."""
    from_cache = any(row.cached_answers for row in rows)
    optional = {
        **dict.fromkeys(("cached_answers", "saved_tokens", "saved"), from_cache),
        "failed": any(row.failed for row in rows),
        "refused": any(row.refused for row in rows),
        "billed_unknown": any(row.billed_unknown for row in rows),
        "cost_unknown": any(row.cost_unknown for row in rows),
    }
    for row in rows:
        labels = {
            name: names.get((name, row.ids.get(name) or ""), row.by[name] or f"(no {name})") for name in dimensions
        }
        yield _shown(row, labels, optional)
    for currency in dict.fromkeys(row.currency for row in rows):
        same = [row for row in rows if row.currency == currency]
        if len(same) > 1:
            labels = dict.fromkeys(dimensions, "") | {next(iter(dimensions), ""): "total"}
            yield _shown(_total(same), labels, optional)


def _shown(row: "UsageRow", labels: dict[str, str], optional: dict[str, bool]) -> dict[str, Any]:
    cells = {
        **labels,
        "operations": f"{row.operations:,}",
        "failed": f"{row.failed:,}",
        "refused": f"{row.refused:,}",
        "cached_answers": f"{row.cached_answers:,}",
        "saved_tokens": f"{row.saved_prompt_tokens + row.saved_completion_tokens:,}",
        "saved": money(row.cached_answers_saved),
        "prompt": f"{row.tokens.prompt_tokens:,}",
        "cached": percent(row.cached_share),
        "output": f"{row.tokens.completion_tokens:,}",
        "billed": money(row.billed),
        "cost": money(row.cost),
        "margin": money(row.margin),
        "margin_%": percent(row.margin_share),
        "currency": row.currency,
        "billed_unknown": f"{row.billed_unknown:,}",
        "cost_unknown": f"{row.cost_unknown:,}",
    }
    return {name: cell for name, cell in cells.items() if optional.get(name, True)}


def _total(rows: "Sequence[UsageRow]") -> "UsageRow":
    import msgspec

    from billing.charge import add_up
    from billing.records import TOKEN_CLASSES, TokenClasses

    def add(name: str) -> Decimal | None:
        known = [amount for row in rows if (amount := getattr(row, name)) is not None]
        return add_up(known) if known else None

    amounts = ("billed", "cost", "margin", "billed_adjustment", "cost_adjustment", "cached_answers_saved")
    counts = (
        *("operations", "failed", "refused", "billed_unknown", "cost_unknown"),
        *("cached_answers", "saved_prompt_tokens", "saved_completion_tokens", "cached_answers_saved_unknown"),
    )
    tokens = TokenClasses(**{name: sum(getattr(row.tokens, name) for row in rows) for name in TOKEN_CLASSES})
    sums: dict[str, Any] = {name: add(name) for name in amounts}
    sums |= {name: sum(getattr(row, name) for row in rows) for name in counts}
    return msgspec.structs.replace(rows[0], tokens=tokens, **sums)


def _ranges(found: "Forecast", amount: Any) -> Iterable[dict[str, Any]]:
    for name in ("billed", "cost", "margin"):
        value: Range = getattr(found, name)
        yield {
            "month": found.month,
            "amount": name,
            **{
                column: None if (each := getattr(value, column)) is None else amount(each)
                for column in ("so_far", "expected", "low", "high")
            },
            "currency": found.currency,
        }


def _basis(found: "Forecast") -> str:
    days = f"{found.days_left.quantize(Decimal('0.1'))} days left"
    how = "the mean of the same weekday" if found.by_weekday else "the mean day"
    unknown = f" {found.unknown} operations have no known charge and are in no amount." if found.unknown else ""
    if not found.history_days:
        return f"{found.currency}: {days}; there is no whole day of usage yet to tell the rest by.{unknown}"
    return (
        f"{found.currency}: {days}, each expected to bring {how} of the last {found.history_days} days. "
        f"Four times in five the month ends between low and high, if days vary as they did.{unknown}"
    )
