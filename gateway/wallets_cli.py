"""`farthing wallets …`: credit that is paid for in advance. Heavy imports wait, as in cli.py."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from gateway.budgets_cli import (
    Also,
    Org,
    Which,
    billed_in,
    decimal,
    further_scopes,
    scope_columns,
    scope_id,
    scope_words,
    scopes_of,
)
from gateway.command_line import AmountCommand, DatabaseUrl, DataDir, Json, fail, in_database, show

if TYPE_CHECKING:
    from decimal import Decimal

    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.wallets import Wallet, WalletEntry
    from gateway.budgets_cli import Names

WalletId = Annotated[UUID, typer.Argument(metavar="ID", help="The id that `farthing wallets list` shows.")]
Note = Annotated[str | None, typer.Option(help="Why, for its account.")]

CLOSE_SECONDS = 10.0
"""How long gateways have to give back what no call uses."""

app = typer.Typer(help="Prepaid credit: make wallets, top them up, show what is left.", no_args_is_help=True)


@app.command()
def create(
    kind: Annotated[str, typer.Argument(metavar="SCOPE", help="org, team, user, key, tag or model.")],
    which: Which,
    also: Also = None,
    currency: Annotated[str | None, typer.Option(help="Of its credit. Default: what the gateway bills in.")] = None,
    org: Org = "default",
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Make an empty wallet; from then on the calls of its scope are paid from it, and refused when it has no more."""

    async def work(connection: "AsyncConnection") -> UUID:
        from typing import cast

        from billing.allowances import ScopeKind
        from billing.wallets import create_wallet

        charged_in = await billed_in(connection, currency)
        identifier = await scope_id(connection, kind, which, org)
        further = await further_scopes(connection, also, org)
        # The scope is checked by create_wallet.
        return await create_wallet(connection, cast(ScopeKind, kind), identifier, also=further, currency=charged_in)

    wallet_id = in_database(work, database_url, data_dir)
    typer.echo(f"{scope_words(kind, which, also)}: wallet {wallet_id}, empty; fill it with `farthing wallets top-up`")


@app.command("top-up", cls=AmountCommand)
def top_up(
    wallet_id: WalletId,
    amount: Annotated[str, typer.Argument(metavar="AMOUNT", help="How much was paid in.")],
    expires: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="When, in UTC. Default: never.")
    ] = None,
    note: Note = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Add credit. What expires first is used first."""
    credit = decimal(amount)
    expires_at = None if expires is None else expires.replace(tzinfo=UTC)

    async def work(connection: "AsyncConnection") -> "Wallet | None":
        from billing import wallets

        await wallets.top_up(connection, wallet_id, credit, expires_at=expires_at, note=note)
        return await wallets.get_wallet(connection, wallet_id)

    _say_balance(in_database(work, database_url, data_dir))


@app.command(cls=AmountCommand)
def refund(
    wallet_id: WalletId,
    amount: Annotated[str, typer.Argument(metavar="AMOUNT", help="How much of what was charged.")],
    note: Note = None,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Give back what calls were charged."""
    credit = decimal(amount)

    async def work(connection: "AsyncConnection") -> "Wallet | None":
        from billing import wallets

        await wallets.refund(connection, wallet_id, credit, note=note)
        return await wallets.get_wallet(connection, wallet_id)

    _say_balance(in_database(work, database_url, data_dir))


@app.command(cls=AmountCommand)
def adjust(
    wallet_id: WalletId,
    amount: Annotated[str, typer.Argument(metavar="AMOUNT", help="Below 0 to take credit away, like -5.")],
    note: Annotated[str, typer.Option(help="Why, for its account.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Correct a balance, up or down, never below what calls hold of it."""
    difference = decimal(amount)

    async def work(connection: "AsyncConnection") -> "Wallet | None":
        from billing import wallets

        await wallets.adjust(connection, wallet_id, difference, note=note)
        return await wallets.get_wallet(connection, wallet_id)

    _say_balance(in_database(work, database_url, data_dir))


@app.command()
def close(
    wallet_id: WalletId,
    note: Annotated[str, typer.Option(help="Why, for its account.")],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Take away what is left in a wallet, and pay no more calls from it; its account stays."""
    import time

    async def work(connection: "AsyncConnection") -> "tuple[Decimal, Wallet | None]":
        from billing import wallets

        held = await wallets.close(connection, wallet_id, note=note)
        return held, await wallets.get_wallet(connection, wallet_id)

    end = time.monotonic() + CLOSE_SECONDS
    while True:
        held, wallet = in_database(work, database_url, data_dir)
        if not held:
            break
        if time.monotonic() > end:
            assert wallet is not None
            fail(
                f"calls still hold {held:f} {wallet.currency} of it, and no other can have any; close it again when "
                "they have ended (`farthing leases list` shows gateways that were lost with what they held)"
            )
        time.sleep(0.5)
    typer.echo(f"wallet {wallet_id} is closed: calls are not paid from it any more")


@app.command("show")
def show_(
    wallet_id: WalletId, as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None
) -> None:
    """Show one wallet."""

    async def work(connection: "AsyncConnection") -> "tuple[list[Wallet], Names]":
        from billing.wallets import get_wallet

        wallet = await get_wallet(connection, wallet_id)
        return await _named(connection, [] if wallet is None else [wallet])

    wallets, names = in_database(work, database_url, data_dir)
    if not wallets:
        fail(f"there is no wallet {wallet_id}; `farthing wallets list` shows all")
    show([_row(wallet, names, as_json) for wallet in wallets], as_json)


@app.command("list")
def list_(as_json: Json = False, database_url: DatabaseUrl = None, data_dir: DataDir = None) -> None:
    """List all wallets: balance, what gateways hold of it for calls, what is available."""

    async def work(connection: "AsyncConnection") -> "tuple[list[Wallet], Names]":
        from billing.wallets import list_wallets

        return await _named(connection, await list_wallets(connection))

    wallets, names = in_database(work, database_url, data_dir)
    show([_row(wallet, names, as_json) for wallet in wallets], as_json)


@app.command()
def entries(
    wallet_id: WalletId,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many, the newest first.")] = 100,
    as_json: Json = False,
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
) -> None:
    """List a wallet's entries: what was paid in, charged, refunded, corrected, and what expired.

    `uncollected` is what calls were charged above what the wallet had; nobody pays that.
    """

    async def work(connection: "AsyncConnection") -> "list[WalletEntry] | None":
        from billing import wallets

        if await wallets.get_wallet(connection, wallet_id) is None:
            return None
        return await wallets.list_entries(connection, wallet_id, limit=limit)

    found = in_database(work, database_url, data_dir)
    if found is None:
        fail(f"there is no wallet {wallet_id}; `farthing wallets list` shows all")
    rows = [
        {
            "at": entry.created_at,
            "kind": entry.kind,
            "amount": entry.amount,
            "uncollected": entry.uncollected or None,
            "expires_at": entry.expires_at,
            "actor": entry.actor,
            "note": entry.note,
        }
        for entry in found
    ]
    show(rows, as_json)


async def _named(connection: "AsyncConnection", wallets: "list[Wallet]") -> "tuple[list[Wallet], Names]":
    from gateway.scope_names import scope_names

    return wallets, await scope_names(connection, scopes_of(wallets))


def _row(wallet: "Wallet", names: "Names", as_json: bool) -> dict[str, Any]:
    return {
        "id": wallet.id,
        **scope_columns(wallet, names, as_json),
        "currency": wallet.currency,
        "balance": wallet.balance,
        "held": wallet.held,
        "available": wallet.available,
        "expiring": wallet.expiring or None,
        "expires_at": wallet.expires_at,
        "closed_at": wallet.closed_at,
    }


def _say_balance(wallet: "Wallet | None") -> None:
    assert wallet is not None, "it was there in this transaction"
    typer.echo(f"balance {wallet.balance:f} {wallet.currency}, of which {wallet.available:f} is available")
