"""`/wallets`: money paid in ahead."""

from collections.abc import Awaitable, Callable
from datetime import datetime
from decimal import Decimal
from uuid import UUID

import msgspec
from litestar import Response, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, JSONBody
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import wallets
from billing.allowances import ScopeKind
from billing.roles import Caller
from billing.wallets import Wallet, WalletEntry
from gateway.admin.access import needs
from gateway.admin.moments import moment
from gateway.admin.paging import Listing, Page, cut, listing
from gateway.admin.scopes import charged_in, find, own, refuse_other_scope, refuse_whole
from gateway.admin.writing import Admin, Writer


class NewWallet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    scope_kind: ScopeKind
    scope_id: str
    """The id of the org, team, user or key; a model's name; a tag as `name=value`."""
    also: dict[ScopeKind, str] = {}
    """Further scopes: only calls that have all of them are paid from it."""
    currency: str | None = None
    """null: what the gateway bills in."""


class TopUp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    amount: Decimal
    expires_at: datetime | None = None
    """null: never."""
    note: str | None = None


class Refund(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    amount: Decimal
    note: str | None = None


class Correction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    amount: Decimal
    """Added to the balance; below 0 it is taken."""
    note: str


class Closing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    note: str


@get("/wallets", opt=needs("read"))
async def list_wallets(admin: NamedDependency[Admin], page: NamedDependency[Page]) -> Listing[Wallet]:
    """Wallets as they are now, oldest first."""
    async with admin.read() as conn:
        return cut(await own(admin.caller, conn, await wallets.list_wallets(conn)), page, lambda wallet: wallet.id)


@post("/wallets", opt=needs("manage"))
async def create_wallet(writer: NamedDependency[Writer], data: JSONBody[NewWallet]) -> Response[Wallet]:
    """Make a scope's wallet, with nothing in it. From then on its calls are paid from it."""

    async def work(conn: AsyncConnection) -> Wallet:
        await refuse_other_scope(conn, writer.caller, data.scope_kind, data.scope_id, data.also)
        currency = await charged_in(conn, data.currency)
        made = await wallets.create_wallet(
            conn, data.scope_kind, data.scope_id, also=data.also or None, currency=currency
        )
        return await _find(writer.caller, conn, made)

    return await writer.write(work)


@get("/wallets/{wallet_id:uuid}", opt=needs("read"))
async def get_wallet(admin: NamedDependency[Admin], wallet_id: FromPath[UUID]) -> Wallet:
    async with admin.read() as conn:
        return await _find(admin.caller, conn, wallet_id)


@get("/wallets/{wallet_id:uuid}/entries", opt=needs("read"))
async def list_entries(
    admin: NamedDependency[Admin], page: NamedDependency[Page], wallet_id: FromPath[UUID]
) -> Listing[WalletEntry]:
    """A wallet's account, newest first."""
    async with admin.read() as conn:
        await _find(admin.caller, conn, wallet_id)
        found = await wallets.list_entries(conn, wallet_id, before=page.after_id, limit=page.limit + 1)
    return listing(found, page, lambda entry: entry.id)


@post("/wallets/{wallet_id:uuid}/top-up", opt=needs("manage"), status_code=200)
async def top_up(writer: NamedDependency[Writer], wallet_id: FromPath[UUID], data: JSONBody[TopUp]) -> Response[Wallet]:
    """Add credit, which is used before any that expires later."""
    return await _change(
        writer,
        wallet_id,
        lambda conn: wallets.top_up(conn, wallet_id, data.amount, expires_at=moment(data.expires_at), note=data.note),
    )


@post("/wallets/{wallet_id:uuid}/refund", opt=needs("manage"), status_code=200)
async def refund(
    writer: NamedDependency[Writer], wallet_id: FromPath[UUID], data: JSONBody[Refund]
) -> Response[Wallet]:
    """Give back what calls were charged; it does not expire."""
    return await _change(writer, wallet_id, lambda conn: wallets.refund(conn, wallet_id, data.amount, note=data.note))


@post("/wallets/{wallet_id:uuid}/adjust", opt=needs("manage"), status_code=200)
async def adjust(
    writer: NamedDependency[Writer], wallet_id: FromPath[UUID], data: JSONBody[Correction]
) -> Response[Wallet]:
    """Correct a balance, up or down."""
    return await _change(writer, wallet_id, lambda conn: wallets.adjust(conn, wallet_id, data.amount, note=data.note))


@post("/wallets/{wallet_id:uuid}/close", opt=needs("manage"), status_code=200)
async def close(
    writer: NamedDependency[Writer], wallet_id: FromPath[UUID], data: JSONBody[Closing]
) -> Response[Wallet]:
    """Take away what is left in it, and pay no more calls from it; its account stays. While calls hold a part of it
    `closed_at` stays null, and no other call can have any: close it again (with another idempotency key) when they have
    ended."""
    return await _change(writer, wallet_id, lambda conn: wallets.close(conn, wallet_id, note=data.note))


ROUTES = [list_wallets, create_wallet, get_wallet, list_entries, top_up, refund, adjust, close]


async def _find(caller: Caller, conn: AsyncConnection, wallet_id: UUID) -> Wallet:
    found = await wallets.get_wallet(conn, wallet_id)
    return find(await own(caller, conn, [] if found is None else [found]), wallet_id)


async def _change(
    writer: Writer, wallet_id: UUID, change: Callable[[AsyncConnection], Awaitable[object]]
) -> Response[Wallet]:
    """The wallet after `change`, where the caller may make it."""

    async def work(conn: AsyncConnection) -> Wallet:
        refuse_whole(writer.caller, await _find(writer.caller, conn, wallet_id))
        await change(conn)
        return await _find(writer.caller, conn, wallet_id)

    return await writer.write(work)
