"""Operations as the gateway would record them."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from billing.ids import new_id
from billing.records import AttemptRecord, OperationRecord, TokenClasses

ORG, KEY = new_id(), new_id()


def an_attempt(number: int = 1, **changes: Any) -> AttemptRecord:
    fields: dict[str, Any] = {
        "number": number,
        "upstream": "engine",
        "model": "small-model",
        "started_at": datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC),
        "status": "ok",
        "http_status": 200,
        "tokens": TokenClasses(input_fresh=3, input_cached=16, output_text=550),
        "usage_source": "engine",
        "prefill_device_seconds": 0.1,
        "total_seconds": 1.1 + 2.2,
        "billed": Decimal("0.054399"),
        "cost": Decimal("0.000000000000000001"),
        "price_version_id": new_id(),
    }
    return AttemptRecord(**fields | changes)


def an_operation(**changes: Any) -> OperationRecord:
    fields: dict[str, Any] = {
        "id": new_id(),
        "started_at": datetime.now(UTC),
        "org_id": ORG,
        "team_id": None,
        "user_id": None,
        "key_id": KEY,
        "tags": {"feature": "search", "句": "ä\n\"'"},
        "requested_model": "auto",
        "model": "small-model",
        "route_reasons": ["short", 'has "quotes", {braces}', ""],
        "route_score": 0.1,
        "stream": True,
        "status": "ok",
        "http_status": 200,
        "finish_reason": "stop",
        "total_seconds": 0.30000000000000004,
        "billed": Decimal("0.054399"),
        "cost": Decimal("12345678901234567890.123456789012345678"),
        "currency": "USD",
        "attempts": [an_attempt(1, status="upstream_error", billed=None, cost=None), an_attempt(2)],
    }
    return OperationRecord(**fields | changes)
