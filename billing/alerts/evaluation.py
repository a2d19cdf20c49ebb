"""From what holds to alerts: each opens once, is updated, is told, and resolves when it has been clear for a while."""

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import Row, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.alerts.causes import causes_of
from billing.alerts.channels import list_channels
from billing.alerts.checks import budgets, health, traffic
from billing.alerts.checks.spending import Spikes
from billing.alerts.finding import Finding
from billing.alerts.message import Cause, Event, Message
from billing.alerts.outbox import enqueue
from billing.alerts.rules import Rule, list_rules
from billing.alerts.scopes import RuleScope, label
from billing.alerts.silences import Silence, list_silences
from billing.availability import is_away
from billing.ids import new_id
from billing.tables import alert

EVERY_SECONDS = 60.0

Check = Callable[[AsyncConnection, Any, RuleScope, datetime], AsyncIterator[Finding]]

log = structlog.get_logger(__name__)


class Evaluation:
    """Evaluates all rules, each in a transaction of its own: one that cannot be evaluated holds up no other."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {
            "budget_share": budgets.budget_share,
            "budget_projection": budgets.budget_projection,
            "spike": Spikes().check,
            "cache_hit_rate": traffic.cache_hit_rate,
            "unpriced_model": traffic.unpriced_model,
            "error_rate": traffic.error_rate,
            "latency": health.latency,
            "margin": traffic.margin,
            "spool": health.spool,
            "engine_idle": health.engine_idle,
        }

    async def run(self, engine: AsyncEngine) -> None:
        """Evaluate every rule as of now."""
        await self.run_at(engine, None)

    async def run_at(self, engine: AsyncEngine, now: datetime | None) -> None:
        """The same as of `now`; None: the database's time. Raises only when the database is away."""
        async with engine.begin() as conn:
            moment = now or (await conn.execute(select(func.clock_timestamp()))).scalar_one().astimezone(UTC)
            rules = [rule for rule in await list_rules(conn) if rule.enabled]
            silences = [silence for silence in await list_silences(conn) if silence.until > moment]
            await _end_orphans(conn, [rule.id for rule in rules], moment)
        for rule in rules:
            try:
                async with engine.begin() as conn:
                    check = self._checks[rule.kind]
                    found = [each async for each in check(conn, rule.parameters, rule.scope, moment)]
                    await _apply(conn, rule, found, silences, moment)
            except Exception as error:
                if is_away(error):
                    raise
                log.exception("alert_rule_not_evaluated", rule=str(rule.id), kind=rule.kind)


async def _apply(
    conn: AsyncConnection, rule: Rule, found: Sequence[Finding], silences: Sequence[Silence], now: datetime
) -> None:
    query = select(alert).where(alert.c.rule_id == rule.id, alert.c.resolved_at.is_(None)).with_for_update()
    open_alerts = {(row.scope_kind, row.scope_id, row.subject): row for row in await conn.execute(query)}
    for finding in found:
        known = open_alerts.pop((finding.scope_kind, finding.scope_id, finding.subject), None)
        if known is not None or not finding.holding:
            row = await _keep(conn, rule, finding, known, now)
            if row is None:
                continue
            covered = any(each.covers(rule.id, row.scope_kind, row.scope_id) for each in silences)
            if row.level > row.told_level and not covered:
                await _tell(conn, rule.channels, "opened" if row.told_level < 0 else "worse", row, now)
    for row in open_alerts.values():
        since = row.clear_since or now
        if now - since >= timedelta(minutes=rule.parameters.clear_minutes):
            await _resolve(conn, rule.channels, row, now)
        elif row.clear_since is None:
            await conn.execute(update(alert).where(alert.c.id == row.id).values(clear_since=now))


async def _keep(
    conn: AsyncConnection, rule: Rule, finding: Finding, known: Row[Any] | None, now: datetime
) -> Row[Any] | None:
    """Open an alert, or bring the open one up to date; its row, or None when another replica has opened it just now.

    Who caused it is asked when it opens or gets worse.
    """
    values: dict[str, Any] = {"clear_since": None, "updated_at": now}
    if known is None or not finding.holding:
        values |= {"summary": finding.summary, "details": finding.details, "level": finding.level}
    if finding.rise is not None and (known is None or finding.level > known.level):
        causes = await causes_of(conn, finding.rise, finding.scope_kind, finding.scope_id)
        values["causes"] = msgspec.to_builtins(causes)
    if known is not None:
        change = update(alert).where(alert.c.id == known.id).values(values)
        changed: Row[Any] = (await conn.execute(change.returning(alert))).one()
        return changed
    which = {name: getattr(finding, name) for name in ("scope_kind", "scope_id", "subject")}
    row = {"id": new_id(), "rule_id": rule.id, "kind": rule.kind, "opened_at": now, **which, **values}
    opening = insert(alert).values(row).on_conflict_do_nothing().returning(alert)
    opened: Row[Any] | None = (await conn.execute(opening)).one_or_none()
    return opened


async def _resolve(conn: AsyncConnection, channels: Sequence[str] | None, row: Row[Any], now: datetime) -> None:
    """What somebody was told of is told to be over, also while a silence holds."""
    values = {"resolved_at": now, "updated_at": now, "clear_since": row.clear_since or now}
    await conn.execute(update(alert).where(alert.c.id == row.id).values(values))
    if row.told_level >= 0:
        await _tell(conn, channels, "resolved", row, now)


async def _tell(
    conn: AsyncConnection, channels: Sequence[str] | None, event: Event, row: Row[Any], now: datetime
) -> None:
    """Put it into the outbox. Without any channel it stays untold, until there is one."""
    there = [channel.name for channel in await list_channels(conn) if channels is None or channel.name in channels]
    if not there:
        return
    message = Message(
        event=event,
        alert_id=row.id,
        rule=row.kind,
        scope_kind=row.scope_kind,
        scope_id=row.scope_id,
        scope=await label(conn, row.scope_kind, row.scope_id),
        summary=row.summary,
        details=row.details,
        causes=msgspec.convert(row.causes, tuple[Cause, ...]),
        opened_at=row.opened_at,
        at=now,
    )
    await enqueue(conn, there, message)
    await conn.execute(update(alert).where(alert.c.id == row.id).values(told_level=row.level))


async def _end_orphans(conn: AsyncConnection, rules: Sequence[UUID], now: datetime) -> None:
    """Resolve what rules have opened that are removed or switched off since."""
    orphans = select(alert).where(alert.c.resolved_at.is_(None), alert.c.rule_id.not_in(rules)).with_for_update()
    for row in (await conn.execute(orphans)).all():
        await _resolve(conn, None, row, now)
