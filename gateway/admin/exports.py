"""`/exports`: usage and costs as files, streamed."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from datetime import datetime

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery
from litestar.response import Stream
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.exports.focus import View, export_focus
from billing.exports.sheets import Format
from billing.exports.usage import export_usage
from billing.filters import Filters
from billing.gaps import gap
from gateway.admin.access import needs
from gateway.admin.moments import period
from gateway.admin.writing import Admin
from gateway.errors import ApiError

AT_ONCE = 4
"""Of one process: each has a connection to the database for as long as its reader takes."""
RUNNING = asyncio.Semaphore(AT_ONCE)
MEDIA_TYPES = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}


@get("/exports/usage", opt=needs("read"), media_type="text/csv")
async def usage_file(
    admin: NamedDependency[Admin],
    filters: NamedDependency[Filters],
    start: FromQuery[datetime],
    end: FromQuery[datetime],
    format: FromQuery[Format] = "csv",
) -> Stream:
    """Every operation that began in [start, end), one row an attempt, as CSV or Parquet."""
    first, last = period(start, end)
    lacks = await _lacks(admin, first, last, filters)
    return await _file(admin, lambda conn: export_usage(conn, first, last, filters, format), "usage", format, lacks)


@get("/exports/focus", opt=needs("read"), media_type="text/csv")
async def focus_file(
    admin: NamedDependency[Admin],
    filters: NamedDependency[Filters],
    start: FromQuery[datetime],
    end: FromQuery[datetime],
    view: FromQuery[View] = "billed",
    format: FromQuery[Format] = "csv",
) -> Stream:
    """Costs in the FOCUS format: what users were billed, or what the operator paid."""
    first, last = period(start, end)
    lacks = await _lacks(admin, first, last, filters)
    return await _file(
        admin, lambda conn: export_focus(conn, view, first, last, filters, format), f"focus-{view}", format, lacks
    )


ROUTES = [usage_file, focus_file]


async def _lacks(admin: Admin, start: datetime, end: datetime, filters: Filters) -> dict[str, str]:
    """A header where retention has dropped days of the period."""
    async with admin.read() as conn:
        found = await gap(conn, start, end, filters)
    return {} if found is None else {"x-farthing-lacks": str(found)}


async def _file(
    admin: Admin,
    export: Callable[[AsyncConnection], AsyncIterator[bytes]],
    name: str,
    format: Format,
    headers: dict[str, str],
) -> Stream:
    pieces = _pieces(admin, export)
    first = await anext(pieces, b"")  # what is refused is refused before the answer has begun

    async def whole() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    headers = headers | {"content-disposition": f'attachment; filename="{name}.{format}"'}
    return Stream(whole(), media_type=MEDIA_TYPES[format], headers=headers)


async def _pieces(
    admin: Admin, export: Callable[[AsyncConnection], AsyncIterator[bytes]]
) -> AsyncGenerator[bytes, None]:
    if RUNNING.locked():
        text = f"{AT_ONCE} exports are being read from this gateway. Try again when one has ended."
        raise ApiError(429, "too_many_exports", text, headers={"retry-after": "10"})
    async with RUNNING, admin.snapshot() as conn:
        async for piece in export(conn):
            yield piece
