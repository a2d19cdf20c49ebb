"""`/reconciliation`: an upstream's bill beside the ledger."""

from decimal import Decimal

import msgspec
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.bills import read_bill
from billing.reconciliation import TOLERANCE, Reconciliation, reconcile
from gateway.admin.access import needs
from gateway.admin.usage import REPORT_SECONDS
from gateway.admin.writing import Writer


class Bill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    upstream: str
    """Whose it is, as the configuration names it."""
    csv: str
    """As the upstream exports it."""
    columns: dict[str, str] | None = None
    """Field -> name of its column, of a bill that is neither OpenAI's nor Anthropic's export."""
    models: dict[str, str] = {}
    """Theirs -> ours, of models that the bill calls otherwise."""
    month: str | None = None
    """Only this one (UTC), like 2026-11; null: the bill's days."""
    tolerance: Decimal = TOLERANCE
    """Share by which the sides may differ, beside what the bill's rounding explains."""


@post("/reconciliation", opt=needs("read", everywhere=True), status_code=200)
async def compare(writer: NamedDependency[Writer], data: JSONBody[Bill]) -> Response[Reconciliation]:
    """Compare a bill with the ledger, day by day and model by model; it changes nothing."""

    async def work(conn: AsyncConnection) -> Reconciliation:
        lines = read_bill(data.csv, data.columns)
        return await reconcile(
            conn, data.upstream, lines, month=data.month, tolerance=data.tolerance, names=data.models
        )

    return await writer.write(work, REPORT_SECONDS)


ROUTES = [compare]
