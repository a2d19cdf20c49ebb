"""`farthing prices …`: the price book, its overrides, corrections and the public catalogue. Heavy imports wait."""

from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from gateway.command_line import DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.adjustments import Rerating
    from billing.price_changes import Change, Entry
    from billing.prices import Price, PriceTerms

DEFAULT_CURRENCY = "USD"

Amount = Annotated[str | None, typer.Option(metavar="AMOUNT", rich_help_panel="Per million tokens")]
Flat = Annotated[str | None, typer.Option(metavar="AMOUNT", rich_help_panel="Other parts")]
Org = Annotated[str | None, typer.Option(help="An override for this organisation (with --team: the team's).")]
Team = Annotated[str | None, typer.Option(help="An override for this team of --org (else of `default`).")]
Key = Annotated[str | None, typer.Option(help="An override for this key: its id or prefix.")]
From = Annotated[str, typer.Option("--from", help="A day (UTC), or a moment like 2026-12-01T09:00:00Z.")]
To = Annotated[str | None, typer.Option("--to", help="Likewise, not included. Default: now.")]

app = typer.Typer(help="List, enter, check and correct prices.", no_args_is_help=True)


@app.command("list")
def list_(
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Past versions too.")] = False,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """List the prices in force and those to come."""

    async def work(connection: "AsyncConnection") -> "tuple[list[Price], set[UUID], dict[tuple[str, str], str]]":
        from billing.prices import PriceBook, load_all
        from gateway.scope_names import scope_names

        versions = await load_all(connection)
        book = PriceBook(versions)
        in_force = {price.id for price in book.in_force()}
        if not all_:
            versions = [price for price in versions if price.id in in_force or price.effective_at > book.now]
        names = await scope_names(connection, [(price.scope_kind, price.scope_id) for price in versions])
        return versions, in_force, names

    versions, in_force, names = in_database(work, database_url, data_dir)
    now = datetime.now(UTC)
    rows = []
    for price in sorted(versions, key=lambda p: (p.book, p.model, p.upstream, p.scope_kind, p.tier, p.effective_at)):
        if model in (None, price.model):
            state = "in force" if price.id in in_force else "to come" if price.effective_at > now else "past"
            if as_json:
                rows.append(_terms_row(price) | {"effective_at": price.effective_at, "state": state, "id": price.id})
            else:
                rows.append(_for_people(price, names, state))
    show(rows if as_json else _without_empty(rows), as_json, lines=True)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="CSV, TOML ([[price]] tables) or JSON (a list of objects).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Show what a file of prices changes, then enter all of it or, where a row is wrong, nothing."""
    found = in_database(lambda connection: _take(connection, file, dry_run), database_url, data_dir)
    _show_changes(found, as_json)
    if not as_json:
        changed = sum(change.kind != "same" for change in found)
        typer.echo(f"{changed} of {len(found)} would change" if dry_run else f"entered {changed} of {len(found)}")


@app.command()
def diff(
    file: Annotated[Path, typer.Argument(help="As for `import`.")],
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Show what a file of prices would change."""
    _show_changes(in_database(lambda connection: _take(connection, file, True), database_url, data_dir), as_json)


@app.command("set")
def set_(
    model: Annotated[str, typer.Argument(help="Left out: every model (--factor), or a device (--device-hour).")] = "",
    upstream: Annotated[
        str, typer.Option(help="What the operator pays there; without it, what users are billed.")
    ] = "",
    tier: Annotated[
        str | None, typer.Option(help="standard, batch or priority. Default: standard; override: all.")
    ] = None,
    org: Org = None,
    team: Team = None,
    key: Key = None,
    input_fresh: Amount = None,
    input_cached: Amount = None,
    input_cache_write: Amount = None,
    output_text: Amount = None,
    output_reasoning: Amount = None,
    per_request: Flat = None,
    per_image: Flat = None,
    per_cached_answer: Flat = None,
    device_hour: Flat = None,
    factor: Annotated[str | None, typer.Option(help="Of an override: times the list price. 0.8 is 20 % off.")] = None,
    end: Annotated[bool, typer.Option("--end", help="The price ends; an override gives way to the next one.")] = False,
    effective: Annotated[
        str | None,
        typer.Option(help="From this day (UTC) or moment on, like 2026-12-01, to come or past. Default: now."),
    ] = None,
    corrects: Annotated[UUID | None, typer.Option(help="Take the place of this version, from its moment on.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Enter one price. Parts that are not given stay as they are; what users were charged before stays too."""
    from gateway.price_file import amount, moment

    given = {
        name: text
        for name, text in {
            "input_fresh": input_fresh,
            "input_cached": input_cached,
            "input_cache_write": input_cache_write,
            "output_text": output_text,
            "output_reasoning": output_reasoning,
            "per_request": per_request,
            "per_image": per_image,
            "per_cached_answer": per_cached_answer,
            "device_hour": device_hour,
            "factor": factor,
        }.items()
        if text is not None
    }
    if bool(given) == end:
        fail("give at least one part of the price, or --end")
    scope = _scope(org, team, key)
    if factor is not None and scope is None and corrects is None:
        fail("a factor is for an override: say whose, with --org, --team or --key")
    if corrects is not None and (model or upstream or tier or scope or effective):
        fail("--corrects says which price and from when on; leave out the model and the other options for that")

    async def work(connection: "AsyncConnection") -> "list[Change]":
        from billing.price_changes import amended, changes, corrected, enter

        amounts = {name: amount(name, text) for name, text in given.items()}
        at = None if effective is None else moment(effective)
        words = {"model": model, "upstream": upstream} | ({} if tier is None else {"tier": tier})
        if corrects is None:
            blank = await _placed(connection, words, scope)
            entry = await amended(connection, blank, amounts, at)
        else:
            entry = await amended(connection, await corrected(connection, corrects), amounts, None)
        return await (changes if dry_run else enter)(connection, [entry])

    _show_changes(in_database(work, database_url, data_dir), as_json)


@app.command()
def rerate(
    start: From,
    reason: Annotated[str, typer.Option(help="Why; it stands in every adjustment.")],
    end: To = None,
    model: Annotated[str | None, typer.Option(help="Only calls of this model.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be adjusted.")] = False,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Bring past calls to prices that were corrected since. Adds adjustments; ledger and budgets stay as they are."""

    async def work(connection: "AsyncConnection") -> "Rerating":
        from sqlalchemy import func, select

        from billing.adjustments import rerate as run
        from gateway.price_file import moment

        actor = (await connection.execute(select(func.current_setting("farthing.actor", True)))).scalar_one()
        until = datetime.now(UTC) if end is None else moment(end)
        return await run(
            connection, moment(start), until, model=model, reason=reason, actor=actor or "shell", dry_run=dry_run
        )

    found = in_database(work, database_url, data_dir)
    row: dict[str, Any] = {"attempts": found.attempts, "adjusted": found.adjusted, "unpriced": found.unpriced}
    for name, sums in (("billed", found.billed_delta), ("cost", found.cost_delta)):
        row[name] = sums if as_json else ", ".join(f"{total:+f} {currency}" for currency, total in sums.items())
    show([row], as_json)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="The gateway's configuration.")] = Path("farthing.toml"),
    above: Annotated[float, typer.Option(min=0, help="Percent of difference that is worth a word.")] = 5.0,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Compare the book with the configuration and with the vendors' public prices; needs no network."""
    from gateway.check_cli import PLACEHOLDERS
    from gateway.settings_file import ConfigurationError, load

    try:
        settings = load(config, **PLACEHOLDERS)
    except ConfigurationError as error:
        fail(f"{error}\nsee `farthing check {config}`")

    async def work(connection: "AsyncConnection") -> list[dict[str, Any]]:
        from billing.prices import load as load_book
        from gateway.price_check import findings

        return findings(settings, await load_book(connection), Decimal(str(above)))

    rows = in_database(work, database_url, data_dir)
    if rows or as_json:
        show(rows, as_json)
    else:
        typer.echo(f"nothing to say: every model of {config} has all its prices, and none is unlike the public one")


async def _take(connection: "AsyncConnection", file: Path, dry_run: bool) -> "list[Change]":
    from billing.price_changes import changes, enter
    from billing.prices import billing_currency
    from gateway.price_file import Mistake, PriceFileError, read_prices

    rows = read_prices(file, await billing_currency(connection) or DEFAULT_CURRENCY)
    entries, mistakes = [], []
    for row in rows:
        try:
            entries.append(await _found(connection, row.entry, row.scope))
        except ValueError as error:
            mistakes.append(Mistake(row.line, str(error)))
    if mistakes:
        raise PriceFileError(file, mistakes)
    return await (changes if dry_run else enter)(connection, entries)


async def _found(connection: "AsyncConnection", entry: "Entry", scope: tuple[str, str] | None) -> "Entry":
    """With the id of whom an override is for. Raises ValueError."""
    import msgspec

    if scope is None:
        return entry
    identifier = await _scope_id(connection, *scope)
    return msgspec.structs.replace(entry, terms=msgspec.structs.replace(entry.terms, scope_id=identifier))


async def _placed(connection: "AsyncConnection", words: dict[str, str], scope: tuple[str, str] | None) -> "PriceTerms":
    """Which price is meant, without any amount."""
    from billing.prices import billing_currency
    from gateway.price_file import terms_of_row

    currency = await billing_currency(connection) or DEFAULT_CURRENCY
    if scope is not None:
        scope = (scope[0], await _scope_id(connection, *scope))
    return terms_of_row(words, {}, scope, currency)


def _scope(org: str | None, team: str | None, key: str | None) -> tuple[str, str] | None:
    if key is not None and (org or team):
        fail("an override is of one org, team or key")
    if key is not None:
        return "key", key
    if team is not None:
        return "team", f"{org or 'default'}/{team}"
    return None if org is None else ("org", org)


async def _scope_id(connection: "AsyncConnection", kind: str, which: str) -> str:
    """`which`: an org's name, ORG/TEAM, or a key's id or prefix. Raises ValueError."""
    from billing import people

    if kind == "key":
        return str((await people.get_key(connection, which)).key_id)
    org_name, _, team_name = which.rpartition("/") if kind == "team" else (which, "", "")
    org_id = await people.find_org(connection, org_name or "default")
    if org_id is None:
        raise ValueError(f"there is no organisation {org_name or 'default'!r}; `farthing orgs list` shows all")
    if kind == "org":
        return str(org_id)
    team_id = await people.find_team(connection, org_id, team_name)
    if team_id is None:
        raise ValueError(f"there is no team {team_name!r} in the organisation {org_name or 'default'!r}")
    return str(team_id)


def _show_changes(found: "Iterable[Change]", as_json: bool) -> None:
    from billing.price_changes import name_of

    rows: list[dict[str, Any]] = []
    for change in found:
        shared: dict[str, Any] = {
            "change": change.kind,
            "price": name_of(change.terms),
            "from": change.effective_at or "now",
            "until": change.until,
        }
        if as_json:
            pairs = change.differences().items()
            parts = {name: {"before": _plain(old), "after": _plain(new)} for name, (old, new) in pairs}
            rows.append(shared | {"parts": parts, "terms": _terms_row(change.terms)})
        for name, (before, after) in {} if as_json else change.differences().items():
            rows.append(shared | {"part": name, "before": before, "after": after})
        if not as_json and not change.differences():
            rows.append(shared | {"part": None, "before": None, "after": None})
    show(rows, as_json)


def _plain(value: object) -> object:
    return format(value, "f") if isinstance(value, Decimal) else value


def _terms_row(terms: "PriceTerms") -> dict[str, Any]:
    from billing.prices import PriceTerms

    return {name: _plain(getattr(terms, name)) for name in PriceTerms.__struct_fields__}


def _for_people(price: "Price", names: dict[tuple[str, str], str], state: str) -> dict[str, Any]:
    """Narrow enough for a terminal: what few prices have stands below the name."""
    import msgspec

    from billing.price_changes import name_of
    from billing.prices import RATES

    scope = names.get((price.scope_kind, price.scope_id), price.scope_id)
    columns = {"input": "input_fresh", "cached": "input_cached", "output": "output_text"}
    others = [name for name in (*RATES, "device_hour", "factor") if name not in columns.values()]
    amounts = {name: amount for name in others if (amount := _plain(getattr(price, name))) is not None}
    return {
        "price": "\n".join(
            (
                name_of(msgspec.structs.replace(price, scope_id=scope)),
                *(f"  {name.removeprefix('input_').replace('_', ' ')} {amount}" for name, amount in amounts.items()),
                str(price.id),
            )
        ),
        **{column: _plain(getattr(price, name)) for column, name in columns.items()},
        "from (UTC)": f"{price.effective_at.astimezone(UTC):%Y-%m-%d %H:%M}\n{state}, {price.currency}",
    }


def _without_empty(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Columns that no row fills are not worth the width of a terminal."""
    kept = [name for name in (rows[0] if rows else ()) if any(row[name] not in (None, "") for row in rows)]
    return [{name: row[name] for name in kept} for row in rows]
