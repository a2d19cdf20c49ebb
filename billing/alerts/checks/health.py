"""Rules over how Farthing itself does: how long answers take, what waits on local disks, what engines idle away."""

from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from sqlalchemy import ColumnElement, Text, cast, delete, func, insert, literal, literal_column, select, true
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.alerts.finding import Finding, Rise
from billing.alerts.kinds import EngineIdle, Latency, SpoolDepth
from billing.alerts.money import amount, percent
from billing.alerts.scopes import EACH, RuleScope
from billing.housekeeping import Job
from billing.ids import smallest_id
from billing.spool import Spool
from billing.tables import device_hour, operation, replica_health

HOLD = 0.8
"""Of what opens an alert, what keeps it open."""
REPORT_SECONDS = 20.0
KEPT = timedelta(hours=2)
_ID_SLACK = timedelta(hours=1)  # an id may be made a little before or after `started_at` is read


def health_report(spool: Spool) -> Job:
    """Has this process say how it does: a job of its own in each replica."""

    async def report(engine: AsyncEngine) -> None:
        row = {"replica": spool.replica, "spooled": spool.depth, "free_bytes": spool.free_bytes()}
        async with engine.begin() as conn:
            await conn.execute(insert(replica_health).values(row))
            await conn.execute(delete(replica_health).where(replica_health.c.at < func.now() - KEPT))

    return Job(f"health of {spool.replica}", REPORT_SECONDS, report)


async def spool(conn: AsyncConnection, rule: SpoolDepth, scope: RuleScope, now: datetime) -> AsyncIterator[Finding]:
    """Of each replica that still reports. What waits because the database is away is told when it is back."""
    since = now - timedelta(minutes=rule.minutes)
    columns = replica_health.c
    query = select(columns.replica, columns.at, columns.spooled).where(columns.at >= since - timedelta(minutes=1))
    reports: dict[str, list[tuple[datetime, int]]] = defaultdict(list)
    for row in await conn.execute(query.order_by(columns.at)):
        reports[row.replica].append((row.at, row.spooled))
    for replica, said in reports.items():
        (first, depth_then), (last, depth) = said[0], said[-1]
        least = min(spooled for _, spooled in said)
        if first > since or last < now - 3 * timedelta(seconds=REPORT_SECONDS) or least < HOLD * rule.operations:
            continue
        yield Finding(
            scope_kind=scope.kind,
            scope_id=scope.id,
            subject=replica,
            holding=least < rule.operations or depth < depth_then,
            summary=f"{depth} operations wait on the disk of the gateway process {replica} and are not in the database;"
            f" {rule.minutes} minutes ago it were {depth_then}. Its log says why.",
            details={"replica": replica, "spooled": depth, "spooled_before": depth_then},
        )


async def latency(conn: AsyncConnection, rule: Latency, scope: RuleScope, now: datetime) -> AsyncIterator[Finding]:
    start = now - timedelta(minutes=rule.minutes)
    slowest = func.percentile_cont(literal_column("0.95")).within_group(operation.c.total_seconds)
    member, source, conditions = _members(scope)
    query = (
        select(member.label("member"), func.count().label("answered"), slowest.label("p95"))
        .select_from(source)
        .where(operation.c.id >= smallest_id(start - _ID_SLACK), operation.c.status == "ok")
        .where(operation.c.started_at >= start, operation.c.started_at < now, *conditions)
        .group_by(literal_column("1"))
    )
    for row in await conn.execute(query):
        if row.answered >= rule.minimum_operations and row.p95 >= HOLD * rule.seconds:
            yield Finding(
                scope_kind=scope.kind,
                scope_id=row.member,
                holding=row.p95 < rule.seconds,
                summary=f"Of {row.answered} answers in the last {rule.minutes} minutes the slowest 5% took"
                f" {row.p95:.3g} seconds or longer; {rule.seconds:g} are allowed.",
                details={"p95_seconds": row.p95, "answered": row.answered, "minutes": rule.minutes},
                rise=Rise(measure="slow", start=start, end=now, seconds=rule.seconds),
            )


def _members(scope: RuleScope) -> tuple[ColumnElement[Any], Any, list[ColumnElement[bool]]]:
    """Id of the scope that an operation counts in, what to select from, and which operations."""
    if scope.kind == "all":
        return literal_column("''"), operation, []
    if scope.kind == "tag":
        tag = func.jsonb_each_text(operation.c.tags).table_valued("key", "value", name="tag").lateral()
        member: ColumnElement[Any] = tag.c.key + literal("=", literal_execute=True) + tag.c.value
        source: Any = operation.join(tag, true())
        if scope.each:
            return member, source, [] if scope.id == EACH else [tag.c.key == scope.id.removesuffix(f"={EACH}")]
        return member, source, [member == scope.id]
    member = operation.c.model if scope.kind == "model" else cast(operation.c[f"{scope.kind}_id"], Text)
    return member, operation, [member.is_not(None) if scope.each else member == scope.id]


async def engine_idle(
    conn: AsyncConnection, rule: EngineIdle, scope: RuleScope, now: datetime
) -> AsyncIterator[Finding]:
    """Of each engine. Hours without a price say nothing."""
    columns = device_hour.c
    idle, busy = func.sum(columns.idle_cost), func.sum(columns.busy_cost)
    query = (
        select(columns.upstream, columns.currency, idle.label("idle"), busy.label("busy"))
        .where(columns.starts_at >= now - timedelta(hours=rule.hours), columns.idle_cost.is_not(None))
        .group_by(columns.upstream, columns.currency)
    )
    for row in await conn.execute(query):
        whole = row.idle + (row.busy or 0)
        if whole <= 0 or row.idle < rule.minimum:
            continue
        share = row.idle / whole
        if share >= rule.share * Decimal(str(HOLD)):
            yield Finding(
                scope_kind=scope.kind,
                scope_id=scope.id,
                subject=f"{row.upstream} {row.currency}",
                holding=share < rule.share,
                summary=f"{percent(share)} of what the device of {row.upstream} cost in the last {rule.hours} hours was"
                f" paid for waiting: {amount(row.idle, row.currency)} of {amount(whole, row.currency)}.",
                details={"upstream": row.upstream, "idle_cost": f"{row.idle:f}", "share": float(share)},
            )
