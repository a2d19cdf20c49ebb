"""Every operation of a period as a row: who, which model, the five token classes, billed and cost, timings."""

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.charged import ID_SLACK
from billing.exports.sheets import Column, Digits, Format, Row, sheet
from billing.filters import Filters
from billing.gaps import gap
from billing.ids import smallest_id
from billing.records import TOKEN_CLASSES

_PERSONAL = ("org", "team", "user", "key")

COLUMNS = (
    Column("operation_id"),
    Column("started_at", "time"),
    Column("recorded_at", "time"),
    *(Column(name) for name in _PERSONAL),
    *(Column(f"{name}_id") for name in _PERSONAL),
    Column("tags"),
    Column("api"),
    Column("requested_model"),
    Column("model"),
    Column("status"),
    Column("http_status", "integer"),
    Column("finish_reason"),
    Column("stream", "flag"),
    Column("attempts", "integer"),
    Column("upstream"),
    Column("tier"),
    Column("usage_source"),
    *(Column(name, "integer") for name in TOKEN_CLASSES),
    Column("billed", "decimal"),
    Column("cost", "decimal"),
    Column("margin", "decimal"),
    Column("billed_adjustment", "decimal"),
    Column("cost_adjustment", "decimal"),
    Column("currency"),
    Column("ttft_seconds", "seconds"),
    Column("total_seconds", "seconds"),
    Column("cached_from"),
    *(Column(name, "integer") for name in ("saved_prompt_tokens", "saved_completion_tokens")),
    *(Column(name, "decimal") for name in ("saved_billed", "saved_cost")),
)
"""`billed`, `cost` and `margin` have their adjustments in them; `upstream`, `tier` and `usage_source` are of the last
attempt, tokens of all. The last five are of answers from the response cache: which operation's answer it was, and what
that came to."""

_WITHIN = "o.started_at >= :start AND o.started_at < :end AND o.id >= :first AND o.id < :after"
_ADJUSTED = """
LEFT JOIN (
    SELECT operation_id, sum(billed_delta) AS billed, sum(cost_delta) AS cost FROM adjustment
    WHERE operation_id >= :first AND operation_id < :after GROUP BY operation_id
) j ON j.operation_id = o.id
LEFT JOIN (
    SELECT a.operation_id, sum(a.cost) AS cost, bool_or(a.cost IS NULL AND k.number IS NULL) AS unknown
    FROM attempt a LEFT JOIN (
        SELECT DISTINCT operation_id, number FROM adjustment
        WHERE operation_id >= :first AND operation_id < :after AND cost_delta IS NOT NULL
    ) k ON k.operation_id = a.operation_id AND k.number = a.number
    WHERE a.operation_id IN (
        SELECT operation_id FROM adjustment
        WHERE operation_id >= :first AND operation_id < :after AND cost_delta IS NOT NULL
    ) AND a.operation_id >= :first AND a.operation_id < :after
    GROUP BY a.operation_id
) c ON c.operation_id = o.id AND o.cost IS NULL
"""
_MONEY = """
SELECT o.*, j.billed AS billed_adjustment, CASE WHEN c.unknown THEN NULL ELSE j.cost END AS cost_adjustment,
       CASE WHEN j.billed IS NULL THEN o.billed ELSE coalesce(o.billed, 0) + j.billed END AS now_billed,
       CASE WHEN j.cost IS NULL OR c.unknown THEN o.cost ELSE coalesce(o.cost, c.cost, 0) + j.cost END AS now_cost
"""
"""An operation is known to cost something once all of its attempts are."""
_TOKENS = ", ".join(f"sum(a.{name})::bigint AS {name}" for name in TOKEN_CLASSES)
_LAST = ", ".join(
    f"(array_agg(a.{name} ORDER BY a.number DESC))[1] AS {name}" for name in ("upstream", "tier", "usage_source")
)

_ROWS = f"""
SELECT o.id, o.started_at, o.recorded_at, org.name, team.name, app_user.name, api_key.name,
       o.org_id, o.team_id, o.user_id, o.key_id, o.tags, o.api, o.requested_model, o.model, o.status, o.http_status,
       o.finish_reason, o.stream, coalesce(t.attempts, 0), t.upstream, t.tier, t.usage_source,
       {", ".join(f"coalesce(t.{name}, 0)" for name in TOKEN_CLASSES)},
       o.now_billed, o.now_cost, o.now_billed - o.now_cost,
       coalesce(o.billed_adjustment, 0), coalesce(o.cost_adjustment, 0), o.currency, o.ttft_seconds, o.total_seconds,
       o.cached_from, o.saved_prompt_tokens, o.saved_completion_tokens, o.saved_billed, o.saved_cost
FROM ({_MONEY} FROM operation o {_ADJUSTED} WHERE {_WITHIN}{{condition}}) o
LEFT JOIN (
    SELECT a.operation_id, count(*) AS attempts, {_LAST}, {_TOKENS} FROM attempt a
    WHERE a.operation_id >= :first AND a.operation_id < :after GROUP BY a.operation_id
) t ON t.operation_id = o.id
LEFT JOIN org ON org.id = o.org_id
LEFT JOIN team ON team.id = o.team_id
LEFT JOIN app_user ON app_user.id = o.user_id
LEFT JOIN api_key ON api_key.id = o.key_id
ORDER BY o.id
"""  # noqa: S608 - names of columns

_AMOUNTS = (
    *("now_billed", "now_cost", "now_billed - o.now_cost", "billed_adjustment", "cost_adjustment"),
    *("saved_billed", "saved_cost"),
)
_DIGITS = f"""
SELECT {", ".join(f"max(abs(trunc(o.{each}))), max(min_scale(o.{each}))" for each in _AMOUNTS)}
FROM ({_MONEY} FROM operation o {_ADJUSTED} WHERE {_WITHIN}{{condition}}) o
"""  # noqa: S608 - names of columns


async def export_usage(
    conn: AsyncConnection,
    start: datetime,
    end: datetime,
    filters: Filters = Filters(),  # noqa: B008 - frozen
    format: Format = "csv",
) -> AsyncIterator[bytes]:
    """The file of the operations that started in [start, end), in pieces, in order of their ids.

    Reads with a cursor of the caller's transaction, which nothing else may use meanwhile. Raises ValueError on an
    unknown format, and where Parquet cannot hold the digits.
    """
    condition, parameters = filters.sql()
    parameters |= {
        "start": start,
        "end": end,
        "first": smallest_id(start - ID_SLACK),
        "after": smallest_id(end + ID_SLACK),
    }

    async def rows() -> AsyncIterator[Row]:
        async with conn.stream(text(_ROWS.format(condition=condition)), parameters) as result:
            async for row in result:
                yield tuple(map(_plain, row))

    digits = None
    if format == "parquet":
        digits = await _digits(conn, condition, parameters)
    async for piece in sheet(rows, COLUMNS, format, digits, await gap(conn, start, end, filters)):
        yield piece


async def _digits(conn: AsyncConnection, condition: str, parameters: dict[str, Any]) -> list[Digits]:
    found = (await conn.execute(text(_DIGITS.format(condition=condition)), parameters)).one()
    pairs = iter(
        Digits(max(1, 0 if largest is None else largest.adjusted() + 1), after or 0)
        for largest, after in zip(found[::2], found[1::2], strict=True)
    )
    return [next(pairs) if column.kind == "decimal" else Digits() for column in COLUMNS]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    return str(value) if isinstance(value, UUID) else value
