"""Allowances: what a scope may use up in a window, be it money (a budget) or requests, tokens, calls at once (a limit).

Both are rows of the table `budget`, told apart by their unit, and both are leased in the same way (`billing.leases`).
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Literal, get_args
from uuid import UUID

import msgspec
from sqlalchemy import func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.notices import notify
from billing.tables import budget
from billing.windows import Period

ScopeKind = Literal["org", "team", "user", "key", "tag", "model"]
NARROWEST_FIRST: tuple[ScopeKind, ...] = ("key", "user", "team", "tag", "org", "model")
"""An allowance of several scopes is filed under the first of them, in this order."""
Scope = tuple[ScopeKind, str]
"""Its kind, and the id of the org, team, user or key; a model's name; a tag as `name=value`."""

LimitKind = Literal["requests", "tokens", "concurrent"]
Unit = Literal["money"] | LimitKind

CHANNEL = "farthing_budgets"
"""Notices here say `set KIND ID`: a budget or limit of that scope was made, changed or removed; and `gave - ID`: there
is more in that allowance. What else is said here is between replicas (`billing.leases`)."""

LONGEST_SCOPE_ID = 1000
"""In characters: a notice must hold it."""


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """A budget, a wallet or a limit."""

    id: UUID
    scope_kind: ScopeKind
    scope_id: str
    also: dict[ScopeKind, str] = {}
    """Further scopes that a call must have; the one above is the narrowest."""
    unit: Unit
    window: Period
    time_zone: str
    limit_amount: Decimal
    currency: str | None
    """Of money; None for any other unit."""
    hard: bool
    """A hard one refuses what it cannot cover; a soft one only counts."""
    rolls_since: datetime | None = None
    """The first window whose rest adds to the next; None: what is left of a window is gone with it."""
    rollover_cap: Decimal | None = None
    prepaid: bool = False
    """A wallet: its limit is 0, and what may be spent is the credit in it."""

    @property
    def fixed(self) -> bool:
        """Whether `limit_amount` is the most that there can be."""
        return self.rolls_since is None and not self.prepaid

    @property
    def whose(self) -> str:
        """`the key's`, `the user's and model's`."""
        return "the " + " and ".join(f"{kind}'s" for kind in (self.scope_kind, *self.also))


async def find(conn: AsyncConnection, scopes: Sequence[Scope]) -> tuple[datetime, list[Allowance]]:
    """The database's time, and all allowances of these scopes; a closed wallet is none."""
    now: datetime = (await conn.execute(select(func.clock_timestamp()))).scalar_one()
    columns = [budget.c[name] for name in Allowance.__struct_fields__]
    rows = await conn.execute(
        select(*columns)
        .where(tuple_(budget.c.scope_kind, budget.c.scope_id).in_(list(scopes)), budget.c.closed_at.is_(None))
        .order_by(budget.c.id)
    )
    return now, [Allowance(**row) for row in rows.mappings()]


async def tell_changed(conn: AsyncConnection, kind: str, identifier: str) -> None:
    """Tell every replica, once this transaction commits, that an allowance of a scope is not what it was."""
    await notify(conn, CHANNEL, f"set {kind} {identifier}")


def scope_of(
    kind: ScopeKind, identifier: str, also: Mapping[ScopeKind, str] | None = None
) -> tuple[ScopeKind, str, dict[ScopeKind, str]]:
    """The narrowest of these scopes, and the others: what an allowance of all of them is stored under.

    Raises ValueError, with a sentence, on what is no scope, and on two of one kind.
    """
    if also and kind in also:
        raise ValueError(f"{kind} is there twice; a call has to be in all scopes, which are of different kinds")
    scopes = {kind: identifier, **(also or {})}
    for name, value in scopes.items():
        refuse_bad_scope(name, value)
    first, *others = sorted(scopes, key=NARROWEST_FIRST.index)
    return first, scopes[first], {name: scopes[name] for name in others}


def refuse_bad_scope(kind: str, identifier: str) -> None:
    """Raise ValueError, with a sentence, on what is no scope."""
    if kind not in get_args(ScopeKind):
        raise ValueError(f"{kind!r} is not a scope; use one of {', '.join(get_args(ScopeKind))}")
    if len(identifier) > LONGEST_SCOPE_ID:
        raise ValueError(f"the {kind} has {len(identifier)} characters; at most {LONGEST_SCOPE_ID} are possible")
    name, equals, value = identifier.partition("=")
    if kind == "tag" and not (name and equals and value):
        raise ValueError(f"{identifier!r} is not a tag; write it as name=value")
