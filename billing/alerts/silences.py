"""Silences: until a moment, alerts of a rule or a scope open and resolve as ever, but nobody is told that they opened.

What still holds when its silence is over is told then.
"""

from datetime import UTC, datetime
from uuid import UUID

import msgspec
from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts.scopes import rule_scope
from billing.ids import new_id
from billing.tables import alert_rule, alert_silence

LONGEST_REASON = 500


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    rule_id: UUID | None
    """None: of every rule."""
    scope_kind: str | None
    """None: of every scope."""
    scope_id: str | None
    until: datetime
    reason: str
    created_at: datetime

    def covers(self, rule_id: UUID, scope_kind: str, scope_id: str) -> bool:
        if self.rule_id not in (None, rule_id):
            return False
        if self.scope_kind is None or self.scope_id is None:
            return True
        return rule_scope(self.scope_kind, self.scope_id).holds(scope_kind, scope_id)


async def silence(
    conn: AsyncConnection,
    until: datetime,
    *,
    rule_id: UUID | None = None,
    scope_kind: str | None = None,
    scope_id: str | None = None,
    reason: str = "",
) -> UUID:
    """Tell nobody until then; return the silence's id. Without a rule or a scope it is about all of them.

    Raises ValueError on a moment that is past or has no time zone, an unknown rule and what is no scope.
    """
    if until.tzinfo is None:
        raise ValueError("the end of a silence needs a time zone, like 2026-12-01T08:00:00Z")
    if until <= datetime.now(UTC):
        raise ValueError(f"a silence until {until.isoformat()} is over already")
    if len(reason) > LONGEST_REASON:
        raise ValueError(f"the reason has {len(reason)} characters; at most {LONGEST_REASON} are possible")
    if scope_kind is not None or scope_id is not None:
        scope = rule_scope(scope_kind or "", scope_id or "")
        scope_kind, scope_id = scope.kind, scope.id
    if rule_id is not None:
        known = await conn.execute(select(alert_rule.c.id).where(alert_rule.c.id == rule_id))
        if known.scalar_one_or_none() is None:
            raise ValueError(f"there is no rule {rule_id}; `farthing alerts rules list` shows all")
    identifier = new_id()
    row = {
        "id": identifier,
        "rule_id": rule_id,
        "scope_kind": scope_kind,
        "scope_id": scope_id,
        "until": until,
        "reason": reason,
    }
    await conn.execute(insert(alert_silence).values(row))
    return identifier


async def list_silences(conn: AsyncConnection) -> list[Silence]:
    """All, those that are over too, the one that lasts longest first."""
    rows = await conn.execute(select(alert_silence).order_by(alert_silence.c.until.desc(), alert_silence.c.id))
    return [Silence(**row) for row in rows.mappings()]


async def end_silence(conn: AsyncConnection, silence_id: UUID) -> bool:
    """Forget a silence; False when there is none."""
    gone = delete(alert_silence).where(alert_silence.c.id == silence_id).returning(alert_silence.c.id)
    return (await conn.execute(gone)).scalar_one_or_none() is not None
