"""How an attempt's billed and cost came about: each part that was priced, beside what the ledger recorded."""

from decimal import Decimal

import msgspec

from billing.charge import EXACT, charge, device_cost, total
from billing.prices import RATES, Price
from billing.records import TOKEN_CLASSES, AttemptRecord, TokenClasses

CLASS_NAMES = {
    "input_fresh": "Input, fresh",
    "input_cached": "Input, cached",
    "input_cache_write": "Input, cache write",
    "output_text": "Output, text",
    "output_reasoning": "Output, reasoning",
}


class Part(msgspec.Struct, frozen=True):
    name: str
    quantity: int | float | None
    """Tokens, or seconds of device time; None: not reported."""
    price: Decimal | None
    """Per million tokens, or per device-hour."""
    amount: Decimal | None
    """None: unknown."""


class Computation(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, one price. The amounts of `tokens`, `flat` and `device` add up to `sum`."""

    price: Price
    tokens: list[Part]
    """One for each class that has tokens; empty for a price by device time alone."""
    flat: list[Part]
    """For the request, and for its images, where the price has such parts."""
    device: Part | None
    sum: Decimal | None
    recorded: Decimal | None

    @property
    def differs(self) -> bool:
        """The ledger has another amount, as it may where an upstream charged for more than the user was sent."""
        return self.sum is not None and self.sum != self.recorded


def explain(attempt: AttemptRecord, price: Price | None, recorded: Decimal | None) -> Computation | None:
    """Compute the amount again from the price version that the attempt names; None when it names none."""
    if price is None:
        return None
    tokens = []
    by_tokens = any(getattr(price, name) is not None for name in TOKEN_CLASSES)
    if by_tokens or price.device_hour is None:
        for name in TOKEN_CLASSES:
            number = getattr(attempt.tokens, name)
            if number:
                rate = getattr(price, name)
                amount = None if rate is None else charge(_only(price, name), TokenClasses(**{name: number}))
                tokens.append(Part(CLASS_NAMES[name], number, rate, amount))
    flat = _flat(attempt, price) if tokens else []
    device = None
    if price.device_hour is not None:
        seconds = _device_seconds(attempt)
        amount = None if seconds is None else device_cost(price, seconds)
        device = Part("Device time", seconds, price.device_hour, amount)
    parts = [*tokens, *flat, *([device] if device else [])]
    amount = total(part.amount for part in parts)
    return Computation(price=price, tokens=tokens, flat=flat, device=device, sum=amount, recorded=recorded)


def _only(price: Price, name: str) -> Price:
    """The price of one token class, without the parts that do not depend on tokens."""
    rates = {other: None for other in RATES if other != name}
    return msgspec.structs.replace(price, **rates)


def _flat(attempt: AttemptRecord, price: Price) -> list[Part]:
    parts = []
    for name, quantity, rate in (("Request", 1, price.per_request), ("Images", attempt.images, price.per_image)):
        if rate is not None and quantity:
            parts.append(Part(name, quantity, rate, EXACT.multiply(rate, Decimal(quantity))))
    return parts


def why_unknown(recorded: Decimal | None, computed: Computation | None) -> str | None:
    """Why an attempt's amount is unknown; None when it is recorded."""
    if recorded is not None:
        return None
    if computed is not None and computed.device is not None and computed.device.quantity is None:
        return "Unknown: no device time was reported"
    return "Unknown: there is no price for it"


def _device_seconds(attempt: AttemptRecord) -> float | None:
    known = [part for part in (attempt.prefill_device_seconds, attempt.decode_device_seconds) if part is not None]
    return sum(known) if known else None
