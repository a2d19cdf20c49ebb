"""Rules: what is watched, for whom, and who is told."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts.kinds import NO_SCOPE, Parameters, changed_parameters, read_parameters
from billing.alerts.scopes import RuleScope, rule_scope
from billing.ids import new_id
from billing.tables import alert_channel, alert_rule

_NONE: Mapping[str, object] = {}


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule with all its parameters."""

    id: UUID
    kind: str
    scope: RuleScope
    parameters: Parameters
    channels: tuple[str, ...] | None
    """Names of those that are told; None: every channel there is."""
    enabled: bool
    created_at: datetime


async def set_rule(
    conn: AsyncConnection,
    kind: str,
    scope_kind: str = "all",
    scope_id: str = "",
    parameters: Mapping[str, object] = _NONE,
    *,
    channels: Sequence[str] | None = None,
    enabled: bool = True,
) -> UUID:
    """Make the scope's rule of this kind, or put these parameters in place of all that it has; return its id.

    Raises ValueError on an unknown kind, scope, parameter or channel, and on a value that makes no sense.
    """
    wanted = read_parameters(kind, parameters)
    scope = rule_scope(scope_kind, scope_id)
    if kind in NO_SCOPE and scope.kind != "all":
        raise ValueError(f"a rule {kind} is about Farthing itself: its scope is all, not {scope.kind}")
    if channels is not None:
        await _refuse_unknown_channels(conn, channels)
    terms: dict[str, Any] = {
        "parameters": changed_parameters(wanted),
        "channels": None if channels is None else sorted(set(channels)),
        "enabled": enabled,
    }
    key = {"kind": kind, "scope_kind": scope.kind, "scope_id": scope.id}
    row = insert(alert_rule).values(id=new_id(), **key, **terms)
    row = row.on_conflict_do_update(index_elements=list(key), set_=terms)
    identifier: UUID = (await conn.execute(row.returning(alert_rule.c.id))).scalar_one()
    return identifier


async def list_rules(conn: AsyncConnection) -> list[Rule]:
    """All rules, the oldest first."""
    rows = await conn.execute(select(alert_rule).order_by(alert_rule.c.created_at, alert_rule.c.id))
    return [
        Rule(
            id=row.id,
            kind=row.kind,
            scope=RuleScope(row.scope_kind, row.scope_id),
            parameters=read_parameters(row.kind, row.parameters),
            channels=None if row.channels is None else tuple(row.channels),
            enabled=row.enabled,
            created_at=row.created_at,
        )
        for row in rows
    ]


async def remove_rule(conn: AsyncConnection, rule_id: UUID) -> bool:
    """Forget a rule and its silences; False when there is none. What it has opened resolves at the next evaluation."""
    gone = delete(alert_rule).where(alert_rule.c.id == rule_id).returning(alert_rule.c.id)
    return (await conn.execute(gone)).scalar_one_or_none() is not None


async def _refuse_unknown_channels(conn: AsyncConnection, names: Sequence[str]) -> None:
    if not names:
        raise ValueError("name at least one channel, or none at all to tell every channel")
    known = set((await conn.execute(select(alert_channel.c.name))).scalars())
    if unknown := sorted(set(names) - known):
        there = f"there are {', '.join(sorted(known))}" if known else "there are none yet"
        raise ValueError(f"there is no channel {unknown[0]!r}; {there}")
