from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import msgspec

from billing.prices import Price
from billing.records import AttemptRecord, TokenClasses
from dashboards.web.explain import explain

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
SALE = Price(
    id=UUID(int=1),
    effective_at=NOON,
    book="sale",
    model="small",
    currency="USD",
    input_fresh=Decimal("0.05"),
    input_cached=Decimal("0.01"),
    output_text=Decimal("0.20"),
)
ATTEMPT = AttemptRecord(
    number=1,
    upstream="engine",
    model="small",
    started_at=NOON,
    status="ok",
    tokens=TokenClasses(input_fresh=226, input_cached=336, output_text=240),
    usage_source="engine",
    prefill_device_seconds=0.5,
    decode_device_seconds=1.3,
    total_seconds=2,
)


def test_each_class_times_its_price_adds_up_to_what_was_recorded() -> None:
    found = explain(ATTEMPT, SALE, Decimal("0.00006266"))
    assert found is not None
    assert [(part.name, part.quantity, part.amount) for part in found.tokens] == [
        ("Input, fresh", 226, Decimal("0.0000113")),
        ("Input, cached", 336, Decimal("0.00000336")),
        ("Output, text", 240, Decimal("0.000048")),
    ]
    assert found.sum == Decimal("0.00006266")
    assert not found.differs and found.device is None


def test_parts_that_do_not_depend_on_tokens_stand_on_lines_of_their_own() -> None:
    price = msgspec.structs.replace(SALE, per_request=Decimal("0.01"), per_image=Decimal("0.002"))
    found = explain(msgspec.structs.replace(ATTEMPT, images=3), price, Decimal("0.01606266"))
    assert found is not None
    assert [(part.name, part.quantity, part.amount) for part in found.flat] == [
        ("Request", 1, Decimal("0.01")),
        ("Images", 3, Decimal("0.006")),
    ]
    assert found.tokens[0].amount == Decimal("0.0000113") and not found.differs
    nothing = explain(msgspec.structs.replace(ATTEMPT, tokens=TokenClasses()), price, Decimal(0))
    assert nothing is not None and nothing.flat == [] and not nothing.differs


def test_a_recorded_amount_that_differs_is_pointed_out() -> None:
    found = explain(ATTEMPT, SALE, Decimal("0.00006267"))
    assert found is not None and found.differs


def test_a_class_without_a_price_makes_the_sum_unknown() -> None:
    tokens = TokenClasses(input_fresh=1, output_reasoning=5)
    found = explain(msgspec.structs.replace(ATTEMPT, tokens=tokens), SALE, None)
    assert found is not None
    assert [part.amount for part in found.tokens] == [Decimal("0.00000005"), None]
    assert found.sum is None and not found.differs


def test_device_time_is_paid_by_the_hour() -> None:
    cost = Price(
        id=UUID(int=2), effective_at=NOON, book="cost", model="small", upstream="engine", currency="USD",
        device_hour=Decimal("0.20"),
    )  # fmt: skip
    found = explain(ATTEMPT, cost, Decimal("0.0001"))
    assert found is not None and found.device is not None
    assert found.tokens == [] and found.device.quantity == 1.8
    assert found.sum == Decimal("0.0001") and not found.differs
    silent = msgspec.structs.replace(ATTEMPT, prefill_device_seconds=None, decode_device_seconds=None)
    unknown = explain(silent, cost, None)
    refused = explain(silent, cost, Decimal(0))  # known to be nothing although no time was reported
    assert refused is not None and refused.sum is None and not refused.differs
    assert unknown is not None and unknown.sum is None and not unknown.differs


def test_without_a_price_version_there_is_nothing_to_explain() -> None:
    assert explain(ATTEMPT, None, None) is None
