"""What alerts there were: one row an opening, with what was told of it."""

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import RowMapping, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts.message import Cause
from billing.alerts.outbox import Delivery, deliveries
from billing.alerts.scopes import label
from billing.tables import alert, alert_delivery


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    rule_id: UUID
    """Of a rule that may be gone since."""
    kind: str
    scope_kind: str
    scope_id: str
    scope: str
    """As a person calls it."""
    subject: str
    level: int
    summary: str
    details: dict[str, Any]
    causes: tuple[Cause, ...]
    opened_at: datetime
    updated_at: datetime
    resolved_at: datetime | None
    told: bool
    """Whether it was sent to a channel; not while a silence holds, or without channels."""


class AlertDetail(msgspec.Struct, frozen=True, kw_only=True):
    alert: Alert
    deliveries: tuple[Delivery, ...]


async def list_alerts(
    conn: AsyncConnection, *, open_only: bool = False, after: tuple[datetime, UUID] | None = None, limit: int = 100
) -> list[Alert]:
    """The newest first; `limit` of them at most. `after`: when the last one seen was opened, and its id."""
    query = select(alert).order_by(alert.c.opened_at.desc(), alert.c.id.desc()).limit(limit)
    if open_only:
        query = query.where(alert.c.resolved_at.is_(None))
    if after is not None:
        query = query.where(tuple_(alert.c.opened_at, alert.c.id) < tuple_(*after))
    return [await _alert(conn, row) for row in (await conn.execute(query)).mappings().all()]


async def find_alert(conn: AsyncConnection, alert_id: UUID) -> AlertDetail | None:
    """One alert with what was told of it; None when there is no such id."""
    row = (await conn.execute(select(alert).where(alert.c.id == alert_id))).mappings().one_or_none()
    if row is None:
        return None
    told = await deliveries(conn, alert_delivery.c.alert_id == alert_id)
    return AlertDetail(alert=await _alert(conn, row), deliveries=tuple(told))


async def _alert(conn: AsyncConnection, row: RowMapping) -> Alert:
    own = {name: row[name] for name in Alert.__struct_fields__ if name in row and name != "causes"}
    return Alert(
        **own,
        causes=msgspec.convert(row["causes"], tuple[Cause, ...]),
        scope=await label(conn, row["scope_kind"], row["scope_id"]),
        told=row["told_level"] >= 0,
    )
