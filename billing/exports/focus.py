"""Costs in the FinOps Open Cost and Usage Specification (FOCUS 1.4, dataset Cost and Usage), for two readers.

`billed`: what users were charged, as their bill from the operator. `cost`: what the operator paid, as bills of the
upstreams, and the device time of its own engines with what of it was idle. One row a UTC day, org, team, user, key, set
of tags and price of one kind of unit. Charges that are unknown are in no row, for a cost must not be null and is not 0.

InvoiceId is left out: our invoices round each line, and their months are on the clock of the org.
"""

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, NamedTuple
from uuid import UUID

from sqlalchemy import Table, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.charge import EXACT
from billing.charged import Charged, charged
from billing.exports.sheets import Column, Format, Row, sheet
from billing.filters import Filters
from billing.gaps import gap
from billing.tables import api_key, app_user, device_hour, org, team

View = Literal["billed", "cost"]
FOCUS_VERSION = "1.4"

COLUMNS = (
    Column("BilledCost", "decimal"),
    Column("BillingAccountId"),
    Column("BillingAccountName"),
    Column("BillingAccountType"),
    Column("BillingCurrency"),
    Column("BillingPeriodEnd", "time"),
    Column("BillingPeriodStart", "time"),
    Column("ChargeCategory"),
    Column("ChargeClass"),
    Column("ChargeDescription"),
    Column("ChargeFrequency"),
    Column("ChargePeriodEnd", "time"),
    Column("ChargePeriodStart", "time"),
    Column("ConsumedQuantity", "decimal"),
    Column("ConsumedUnit"),
    Column("ContractedCost", "decimal"),
    Column("ContractedUnitPrice", "decimal"),
    Column("EffectiveCost", "decimal"),
    Column("HostProviderName"),
    Column("InvoiceIssuerName"),
    Column("ListCost", "decimal"),
    Column("ListUnitPrice", "decimal"),
    Column("PricingCategory"),
    Column("PricingQuantity", "decimal"),
    Column("PricingUnit"),
    Column("ServiceCategory"),
    Column("ServiceName"),
    Column("ServiceProviderName"),
    Column("ServiceSubcategory"),
    Column("SkuId"),
    Column("SkuMeter"),
    Column("SkuPriceDetails"),
    Column("SkuPriceId"),
    Column("SubAccountId"),
    Column("SubAccountName"),
    Column("SubAccountType"),
    Column("Tags"),
    Column("x_KeyId"),
    Column("x_KeyName"),
    Column("x_Model"),
    Column("x_Part"),
    Column("x_PriceOverrideId"),
    Column("x_PriceVersionId"),
    Column("x_TeamId"),
    Column("x_TeamName"),
    Column("x_Tier"),
    Column("x_Upstream"),
    Column("x_UserId"),
    Column("x_UserName"),
)

METERS = {
    "input_fresh": "Input Tokens",
    "input_cached": "Cached Input Tokens",
    "input_cache_write": "Cache Write Tokens",
    "output_text": "Output Tokens",
    "output_reasoning": "Reasoning Tokens",
    "request": "Requests",
    "image": "Images",
    "device": "Device Time",
    "idle": "Idle Device Time",
    "response_cache": "Cached Answers",
    "other": "Other Charges",
}
_UNITS = {"tokens": "Tokens", "requests": "Requests", "images": "Images", "seconds": "Seconds"}
_BY = ("day", "org_id", "team_id", "user_id", "key_id", "tags")
_ONE = Decimal(1)


class _Names(NamedTuple):
    org: dict[UUID, str]
    team: dict[UUID, str]
    user: dict[UUID, str]
    key: dict[UUID, str]


async def export_focus(
    conn: AsyncConnection,
    view: View,
    start: datetime,
    end: datetime,
    filters: Filters = Filters(),  # noqa: B008 - frozen
    format: Format = "csv",
    provider: str = "Farthing",
) -> AsyncIterator[bytes]:
    """The file of what was charged for operations that started in [start, end), in pieces.

    `provider`: the operator's name, as the one who bills users (`billed`) or who is billed (`cost`). Reads with a
    cursor of the caller's transaction, which nothing else may use meanwhile. Raises ValueError as `export_usage` does.
    """
    if view not in ("billed", "cost"):
        raise ValueError(f"{view!r} is no view of costs; use billed (what users were charged) or cost (what you paid)")
    names = _Names(*[await _names(conn, table) for table in (org, team, app_user, api_key)])

    async def rows() -> AsyncIterator[Row]:
        by = _BY if view == "billed" else (*_BY, "upstream")
        async for each in charged(conn, "sale" if view == "billed" else "cost", start, end, filters, by):
            yield _row(each, view, provider, names)
        if view == "cost" and filters == Filters():
            for each in await _idle(conn, start, end):
                yield _row(each, view, provider, names)

    async for piece in sheet(rows, COLUMNS, format, lacks=await gap(conn, start, end, filters)):
        yield piece


async def _names(conn: AsyncConnection, table: Table) -> dict[UUID, str]:
    rows = await conn.execute(select(table.c.id, table.c.name))
    return {row.id: row.name for row in rows}


async def _idle(conn: AsyncConnection, start: datetime, end: datetime) -> list[Charged]:
    """What devices cost while no request was on them."""
    columns = device_hour.c
    day = func.date_trunc("day", columns.starts_at, "UTC").label("day")
    query = (
        select(
            day,
            columns.upstream,
            columns.currency,
            func.sum(columns.idle_seconds).label("seconds"),
            func.sum(columns.idle_cost).label("amount"),
        )
        .where(columns.starts_at >= start, columns.starts_at < end, columns.idle_cost.is_not(None))
        .group_by("day", columns.upstream, columns.currency)
    )
    return [
        Charged(
            dimensions=dict.fromkeys(_BY) | {"day": row.day, "upstream": row.upstream},
            currency=row.currency,
            model="",
            tier="standard",
            part="idle",
            quantity=row.seconds,
            unit="seconds",
            unit_price=None,
            list_price=None,
            per=1,
            amount=row.amount,
            price_version_id=None,
            override_id=None,
        )
        for row in await conn.execute(query)
    ]


def _row(each: Charged, view: View, provider: str, names: _Names) -> Row:
    day: datetime = each.dimensions["day"].astimezone(UTC)
    org_id, team_id, user_id, key_id = (each.dimensions[f"{kind}_id"] for kind in ("org", "team", "user", "key"))
    tags = each.dimensions["tags"]
    period = day.replace(day=1)
    upstream = each.dimensions.get("upstream")
    issuer = provider if view == "billed" else upstream or provider
    account, sub = _accounts(view, provider, org_id, team_id, names)
    values = {
        "BilledCost": each.amount,
        **account,
        "BillingCurrency": each.currency,
        "BillingPeriodEnd": (period + timedelta(days=32)).replace(day=1),
        "BillingPeriodStart": period,
        "ChargeCategory": "Adjustment" if each.part == "adjustment" else "Usage",
        "ChargeClass": None,
        "ChargeDescription": _description(each),
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": day + timedelta(days=1),
        "ChargePeriodStart": day,
        "EffectiveCost": each.amount,
        "HostProviderName": issuer,
        "InvoiceIssuerName": issuer,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Language Model Inference",
        "ServiceProviderName": issuer,
        "ServiceSubcategory": "Generative AI",
        **_pricing(each),
        **sub,
        "Tags": json.dumps(tags, ensure_ascii=False, sort_keys=True) if tags else None,
        "x_KeyId": _text(key_id),
        "x_KeyName": names.key.get(key_id),
        "x_Model": each.model or None,
        "x_Part": each.part,
        "x_PriceOverrideId": _text(each.override_id),
        "x_PriceVersionId": _text(each.price_version_id),
        "x_TeamId": _text(team_id),
        "x_TeamName": names.team.get(team_id),
        "x_Tier": each.tier,
        "x_Upstream": upstream,
        "x_UserId": _text(user_id),
        "x_UserName": names.user.get(user_id),
    }
    return tuple(values[column.name] for column in COLUMNS)


def _accounts(
    view: View, provider: str, org_id: UUID | None, team_id: UUID | None, names: _Names
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Users: an org is the account, its teams are below it. The operator: it is the account, the orgs are below it."""
    if view == "billed":
        assert org_id is not None, "an operation has an org"
        account, sub, kind = (str(org_id), names.org.get(org_id), "Organisation"), (team_id, names.team), "Team"
    else:
        account, sub, kind = (provider, provider, "Operator"), (org_id, names.org), "Organisation"
    keys = ("BillingAccountId", "BillingAccountName", "BillingAccountType")
    below, known = sub
    return dict(zip(keys, account, strict=True)), {
        "SubAccountId": _text(below),
        "SubAccountName": None if below is None else known.get(below),
        "SubAccountType": None if below is None else kind,
    }


def _pricing(each: Charged) -> dict[str, Any]:
    """Quantity times unit price is the cost, exactly. What has no unit price is so many units of money, at 1 each."""
    columns = dict.fromkeys(
        (
            "ConsumedQuantity",
            "ConsumedUnit",
            "ContractedUnitPrice",
            "ListUnitPrice",
            "PricingCategory",
            "PricingQuantity",
            "PricingUnit",
            "SkuId",
            "SkuMeter",
            "SkuPriceDetails",
            "SkuPriceId",
        )
    )
    costs = {"ContractedCost": each.amount, "ListCost": each.amount}
    if each.part == "adjustment":
        return columns | costs
    unit = _UNITS[each.unit]
    if each.unit_price is None:
        quantity, price, listed, priced_in = each.amount, _ONE, _ONE, each.currency
    else:
        quantity = EXACT.divide(each.quantity, Decimal(each.per))
        price = each.unit_price
        listed = price if each.list_price is None else each.list_price
        priced_in = unit if each.per == 1 else f"{each.per} {unit}"
    sku = f"{each.model}/{each.part}"
    return {
        "ConsumedQuantity": each.quantity,
        "ConsumedUnit": unit,
        "ContractedCost": each.amount,
        "ContractedUnitPrice": price,
        "ListCost": EXACT.multiply(quantity, listed),
        "ListUnitPrice": listed,
        "PricingCategory": "Standard",
        "PricingQuantity": quantity,
        "PricingUnit": priced_in,
        "SkuId": sku,
        "SkuMeter": METERS[each.part],
        "SkuPriceDetails": json.dumps({"x_Model": each.model, "x_Tier": each.tier}, ensure_ascii=False),
        "SkuPriceId": f"{sku}/{each.tier}",
    }


def _description(each: Charged) -> str:
    what = "Correction of earlier charges" if each.part == "adjustment" else METERS[each.part]
    return f"{what}, {each.model}" if each.model else what


def _text(value: UUID | None) -> str | None:
    return None if value is None else str(value)
