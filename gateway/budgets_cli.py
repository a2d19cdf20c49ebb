"""`farthing budgets …`: how much a scope may spend in a window. Heavy imports wait, as in cli.py."""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Annotated, Protocol, cast
from uuid import UUID

import typer

from gateway.command_line import AmountCommand, DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.allowances import ScopeKind
    from billing.budgets import Budget

    Names = Mapping[tuple[str, str], str]

Which = Annotated[
    str, typer.Argument(help="Name of an org, team or user; id or prefix of a key; tag as name=value; model.")
]
Org = Annotated[str, typer.Option(help="Organisation of the team or user.")]
Also = Annotated[
    list[str] | None,
    typer.Option(
        "--and",
        metavar="SCOPE=WHICH",
        help="Only calls that are in this one too, like model=gpt-5-mini or tag=app=search; repeatable.",
    ),
]

app = typer.Typer(help="Set, list and remove budgets.", no_args_is_help=True)


@app.command("set", cls=AmountCommand)
def set_(
    kind: Annotated[str, typer.Argument(metavar="SCOPE", help="org, team, user, key, tag or model.")],
    which: Which,
    limit: Annotated[str, typer.Argument(metavar="AMOUNT", help="How much may be spent in one window.")],
    also: Also = None,
    window: Annotated[str, typer.Option(help="hour, day, week, month or none.")] = "month",
    time_zone: Annotated[str, typer.Option(help="Where its days begin, like Europe/Paris.")] = "UTC",
    currency: Annotated[str | None, typer.Option(help="Of the amount. Default: what the gateway bills in.")] = None,
    soft: Annotated[bool, typer.Option("--soft", help="Only count; refuse nothing.")] = False,
    rollover: Annotated[bool, typer.Option("--rollover", help="What is left of a window adds to the next.")] = False,
    rollover_cap: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="The most that is carried into a window; needs --rollover.")
    ] = None,
    org: Org = "default",
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make a budget, or change the one that the scope has for this kind of window."""
    amount = decimal(limit)
    cap = None if rollover_cap is None else decimal(rollover_cap)

    async def work(connection: "AsyncConnection") -> str:

        from billing.allowances import ScopeKind
        from billing.budgets import set_budget
        from billing.windows import Window

        charged_in = await billed_in(connection, currency)
        identifier = await scope_id(connection, kind, which, org)
        await set_budget(
            connection,
            cast(ScopeKind, kind),  # both checked by set_budget
            identifier,
            cast(Window, window),
            amount,
            also=await further_scopes(connection, also, org),
            currency=charged_in,
            time_zone=time_zone,
            hard=not soft,
            rollover=rollover,
            rollover_cap=cap,
        )
        return charged_in

    charged_in = in_database(work, database_url, data_dir)
    typer.echo(
        f"{scope_words(kind, which, also)}: {amount:f} {charged_in}, window {window}"
        f"{'' if time_zone == 'UTC' else f' in {time_zone}'}{', only counted' if soft else ''}"
    )


@app.command("list")
def list_(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List all budgets; of their current windows, what calls have cost (settled) and what gateways hold (leased)."""

    async def work(connection: "AsyncConnection") -> "tuple[list[Budget], Names]":
        from billing.budgets import list_budgets
        from gateway.scope_names import scope_names

        budgets = await list_budgets(connection)
        return budgets, await scope_names(connection, scopes_of(budgets))

    budgets, names = in_database(work, database_url, data_dir)
    rows = [
        {
            "id": budget.id,
            **scope_columns(budget, names, as_json),
            "window": budget.window,
            "hard": budget.hard,
            "currency": budget.currency,
            "limit": budget.limit_amount,
            "rolled_over": budget.rolled_over if budget.rollover else None,
            "settled": budget.settled,
            "leased": budget.leased,
            "resets_at": budget.resets_at,
        }
        for budget in budgets
    ]
    show(rows, as_json)


@app.command()
def remove(
    budget_id: Annotated[UUID, typer.Argument(metavar="ID", help="The id that `farthing budgets list` shows.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Forget a budget; the ledger keeps what was spent."""

    async def work(connection: "AsyncConnection") -> bool:
        from billing.budgets import remove_budget

        return await remove_budget(connection, budget_id)

    if not in_database(work, database_url, data_dir):
        fail(f"there is no budget {budget_id}; `farthing budgets list` shows all")
    typer.echo(f"removed {budget_id}")


def decimal(written: str) -> Decimal:
    """The amount that was written; ends here when it is none."""
    try:
        return Decimal(written)
    except InvalidOperation:
        fail(f"{written!r} is not an amount; write it like 12.50")


async def billed_in(connection: "AsyncConnection", given: str | None) -> str:
    """The currency that the gateway on this database bills in; ends here when another is given, or none is known."""
    from billing.prices import billing_currency

    billed = await billing_currency(connection)
    if billed is None and given is None:
        fail("this database has no prices yet; start the gateway once, or give --currency")
    if billed is not None and given not in (None, billed):
        fail(f"the gateway bills in {billed}; a budget in {given} could not be compared with its charges")
    return billed or str(given)


def scope_words(kind: str, which: str, also: Sequence[str] | None) -> str:
    """The scopes as they were given."""
    return " and ".join([f"{kind} {which}", *(" ".join(pair.split("=", 1)) for pair in also or ())])


class Scoped(Protocol):
    """A budget, limit or wallet."""

    @property
    def scope_kind(self) -> str: ...
    @property
    def scope_id(self) -> str: ...
    @property
    def also(self) -> "Mapping[ScopeKind, str]": ...


def scopes_of(things: Iterable[Scoped]) -> Iterable[tuple[str, str]]:
    """All (kind, id) that they hang on."""
    for thing in things:
        yield thing.scope_kind, thing.scope_id
        yield from thing.also.items()


def scope_columns(thing: Scoped, names: "Names", as_json: bool) -> dict[str, str | None]:
    """What it hangs on, as the columns of a table: ids for scripts, names for people."""
    name = names.get((thing.scope_kind, thing.scope_id), thing.scope_id)
    if as_json:
        also = ", ".join(f"{kind} {identifier}" for kind, identifier in thing.also.items()) or None
        return {"scope": thing.scope_kind, "scope_id": thing.scope_id, "name": name, "also": also}
    also = ", ".join(f"{kind} {names.get((kind, each), each)}" for kind, each in thing.also.items()) or None
    return {"scope": f"{thing.scope_kind} {name}", "also": also}


async def further_scopes(connection: "AsyncConnection", also: Sequence[str] | None, org: str) -> "dict[ScopeKind, str]":
    """What was given as SCOPE=WHICH, as it is stored; ends here on what does not exist."""
    found: dict[ScopeKind, str] = {}
    for pair in also or ():
        kind, equals, which = pair.partition("=")
        if not (equals and which):
            fail(f"{pair!r} is no further scope; write it like model=gpt-5-mini or tag=app=search")
        if kind in found:
            fail(f"{kind} is there twice; a call has to be in all scopes, which are of different kinds")
        identifier = await scope_id(connection, kind, which, org)  # knows all kinds
        found[cast("ScopeKind", kind)] = identifier
    return found


async def scope_id(connection: "AsyncConnection", kind: str, which: str, org: str) -> str:
    """The id that a scope is stored under. What is set on somebody who does not exist would never apply: ends here."""
    from billing import people
    from gateway.scope_names import refuse_role

    refuse_role(kind, which)
    if kind in ("model", "tag"):
        return which
    if kind == "key":
        return str((await people.get_key(connection, which)).key_id)
    if kind not in ("org", "team", "user"):
        fail(f"{kind!r} is not a scope; use org, team, user, key, tag or model")
    org_id = await people.find_org(connection, which if kind == "org" else org)
    if org_id is None:
        fail(f"there is no organisation {which if kind == 'org' else org!r}; `farthing orgs list` shows all")
    if kind == "org":
        return str(org_id)
    member = await (people.find_team if kind == "team" else people.find_user)(connection, org_id, which)
    if member is None:
        fail(f"there is no {kind} {which!r} in the organisation {org!r} (--org); `farthing {kind}s list` shows all")
    return str(member)
