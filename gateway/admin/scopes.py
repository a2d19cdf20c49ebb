"""What hangs on scopes (budgets, limits, wallets): whose it is, and in which currency it counts."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeVar
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from billing.allowances import ScopeKind
from billing.directory import org_of_scope, scopes_of_org
from billing.people import MissingError
from billing.prices import billing_currency
from billing.roles import Caller
from gateway.admin.access import refuse_other_org
from gateway.errors import ApiError
from gateway.scope_names import refuse_role


class OfScope(Protocol):
    @property
    def id(self) -> UUID: ...
    @property
    def scope_kind(self) -> str: ...
    @property
    def scope_id(self) -> str: ...
    @property
    def also(self) -> Mapping[ScopeKind, str]: ...


Thing = TypeVar("Thing", bound=OfScope)

_PARTS = frozenset({"team", "user", "key", "tag"})
"""Scopes within an organisation. Org and model are what the operator bounds it by."""


async def refuse_other_scope(
    conn: AsyncConnection, caller: Caller, kind: ScopeKind, scope_id: str, also: Mapping[ScopeKind, str]
) -> None:
    """Raises ValueError for what is no scope, MissingError for one that is not there, ApiError for one that is not the
    caller's to bound."""
    for each, identifier in ((kind, scope_id), *also.items()):
        refuse_role(each, identifier)
    orgs = {await org_of_scope(conn, each, identifier) for each, identifier in ((kind, scope_id), *also.items())}
    owned = orgs - {None}
    for org_id in owned or {None}:
        refuse_other_org(caller, org_id)
    _refuse_whole(caller, {kind, *also})


def refuse_whole(caller: Caller, thing: OfScope) -> None:
    """Raises ApiError 403 when an organisation's own administrator would change what bounds it as a whole."""
    _refuse_whole(caller, {thing.scope_kind, *thing.also})


def _refuse_whole(caller: Caller, kinds: Collection[str]) -> None:
    if caller.org_id is not None and not _PARTS.intersection(kinds):
        text = "What an organisation may use as a whole is set by administrators of all. Choose a part of it."
        raise ApiError(403, "forbidden", text)


async def own(caller: Caller, conn: AsyncConnection, found: Sequence[Thing]) -> list[Thing]:
    """Those in the caller's organisation."""
    if caller.org_id is None:
        return list(found)
    scopes = await scopes_of_org(conn, caller.org_id)
    return [each for each in found if not scopes.isdisjoint((each.scope_id, *each.also.values()))]


def find(found: Sequence[Thing], identifier: UUID) -> Thing:
    """Raises MissingError when it is not among them."""
    for each in found:
        if each.id == identifier:
            return each
    raise MissingError(f"there is no such thing as {identifier}")


async def charged_in(conn: AsyncConnection, given: str | None) -> str:
    """The currency that gateways bill in. Raises ValueError when another is given, or none is known."""
    billed = await billing_currency(conn)
    if billed is None and given is None:
        raise ValueError("this database has no prices yet; start a gateway with prices, or give the currency")
    if billed is not None and given not in (None, billed):
        raise ValueError(f"the gateway bills in {billed}; amounts in {given} could not be compared with its charges")
    return billed or str(given)
