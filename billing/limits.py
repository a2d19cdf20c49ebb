"""Limits: requests and tokens a minute, and calls at once, of a scope. Taking out of them is `billing.leases`."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, get_args
from uuid import UUID

import msgspec
from sqlalchemy import delete, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.allowances import LimitKind, ScopeKind, scope_of, tell_changed
from billing.ids import new_id
from billing.tables import budget
from billing.windows import BEGINNING

LARGEST_LIMIT = 10**15

_LIMITS = text("""
    SELECT b.*, coalesce(w.leased, 0) AS leased
    FROM budget b LEFT JOIN budget_window w ON w.budget_id = b.id
        AND w.starts_at = CASE b."window" WHEN 'minute' THEN date_trunc('minute', now()) ELSE :beginning END
    WHERE b.unit <> 'money'
    ORDER BY b.id
""").bindparams(beginning=BEGINNING)


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of one scope."""

    id: UUID
    scope_kind: ScopeKind
    scope_id: str
    """The id of the org, team, user or key; a model's name; a tag as `name=value`."""
    also: dict[ScopeKind, str]
    """Further scopes that a call must have."""
    kind: LimitKind
    """`requests` and `tokens` are counted by the minute, `concurrent` is calls at the same time."""
    limit: int
    leased: int
    """Taken out by gateways in this minute (or now): used, or held ready for calls to come."""


async def set_limit(
    conn: AsyncConnection,
    scope_kind: ScopeKind,
    scope_id: UUID | str,
    kind: LimitKind,
    limit: int,
    *,
    also: Mapping[ScopeKind, str] | None = None,
) -> UUID:
    """Make the scope's limit of this kind, or change the one there is; return its id.

    `also` are further scopes, of other kinds: only calls that have all of them are counted. Raises
    ValueError on an unknown scope kind or kind of limit, and on a limit that is negative or absurdly large.
    """
    narrowest, identified, others = scope_of(scope_kind, str(scope_id), also)
    if kind not in get_args(LimitKind):
        raise ValueError(f"{kind!r} is not a kind of limit; use one of {', '.join(get_args(LimitKind))}")
    if not 0 <= limit <= LARGEST_LIMIT:
        raise ValueError(f"the limit of {kind} is {limit}: it must be 0 or more, and at most {LARGEST_LIMIT}")
    window = "none" if kind == "concurrent" else "minute"
    scope = {"scope_kind": narrowest, "scope_id": identified, "also": others}
    key: dict[str, Any] = {**scope, "unit": kind, "window": window, "prepaid": False}
    row = insert(budget).values(id=new_id(), limit_amount=Decimal(limit), currency=None, **key)
    row = row.on_conflict_do_update(index_elements=list(key), set_={"limit_amount": row.excluded.limit_amount})
    identifier: UUID = (await conn.execute(row.returning(budget.c.id))).scalar_one()
    await tell_changed(conn, narrowest, identified)
    return identifier


async def remove_limit(conn: AsyncConnection, limit_id: UUID) -> bool:
    """Forget a limit; False when there is none."""
    gone = delete(budget).where(budget.c.id == limit_id, budget.c.unit != "money")
    scope = (await conn.execute(gone.returning(budget.c.scope_kind, budget.c.scope_id))).one_or_none()
    if scope is not None:
        await tell_changed(conn, scope.scope_kind, scope.scope_id)
    return scope is not None


async def list_limits(conn: AsyncConnection) -> list[Limit]:
    """All limits, in the order of their ids."""
    rows = await conn.execute(_LIMITS)
    return [
        Limit(
            id=row["id"],
            scope_kind=row["scope_kind"],
            scope_id=row["scope_id"],
            also=row["also"],
            kind=row["unit"],
            limit=int(row["limit_amount"]),
            leased=int(row["leased"]),
        )
        for row in rows.mappings()
    ]
