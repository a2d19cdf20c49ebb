"""From tokens and seconds to money: exact Decimal arithmetic, no float, no rounding of a charge."""

import sys
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal, Inexact, InvalidOperation, Overflow
from functools import reduce

from billing.prices import Price
from billing.records import TOKEN_CLASSES, TokenClasses, refuse_bad_money

UNLIMITED_OUTPUT = sys.maxsize
"""What `affordable_output` answers when output is free."""

DEVICE_COST_QUANTUM = Decimal("1E-18")
"""An hour's price per second has no finite decimal, so device cost alone is rounded: half-even, to this unit."""

# Far more digits than a price times a token count has; a result that would still not fit raises instead of rounding.
EXACT = Context(prec=400, traps=[Inexact, InvalidOperation, Overflow])
_UP = Context(prec=400, rounding=ROUND_CEILING, traps=[InvalidOperation, Overflow])
_DOWN = Context(prec=400, rounding=ROUND_FLOOR, traps=[InvalidOperation, Overflow])
"""For bounds of what somebody else wrote, which may be any number: a bound that is a little wider still is one."""
_ROUNDING = Context(prec=400, rounding=ROUND_HALF_EVEN, traps=[InvalidOperation, Overflow])
_PER_MILLION = -6
_SECONDS_AN_HOUR = Decimal(3_600)
_HOURS_A_YEAR = Decimal(8_766)


def charge(price: Price | None, tokens: TokenClasses, images: int = 0) -> Decimal | None:
    """Money for `tokens` of one call whose prompt had `images`, its parts for the request and the images included.

    None when there is no price, or a class that has tokens has none. A price of 0 is free. Where no token was used,
    nothing was answered, and nothing is charged.
    """
    if price is None:
        return None
    millions: Decimal | None = None
    for name in TOKEN_CLASSES:
        if count := getattr(tokens, name):
            rate = getattr(price, name)
            if rate is None:
                return None
            part = EXACT.multiply(rate, Decimal(count))
            millions = part if millions is None else EXACT.add(millions, part)
    amount = EXACT.scaleb(Decimal(0) if millions is None else millions, _PER_MILLION)
    if not _is_flat_in_part(price):
        return amount
    used = tokens.prompt_tokens + tokens.completion_tokens > 0
    return EXACT.add(amount, _flat(price, images, EXACT)) if used else amount


def cached_answer_charge(price: Price | None) -> Decimal | None:
    """Money for an answer from the response cache, which has no tokens: by default nothing. None without a price."""
    return None if price is None else price.per_cached_answer or Decimal(0)


def device_cost(price: Price, device_seconds: float | Decimal) -> Decimal | None:
    """Money for device time; None when the price has no device part.

    A float is converted once, through its repr (the shortest decimal that reads back as the same float), and is
    exact from there on; the quotient by an hour is rounded to DEVICE_COST_QUANTUM. Raises ValueError on negative or
    non-finite seconds.
    """
    if not 0 <= device_seconds < float("inf"):
        raise ValueError(f"device time must be 0 or more seconds, not {device_seconds}")
    if price.device_hour is None:
        return None
    seconds = device_seconds if isinstance(device_seconds, Decimal) else Decimal(repr(float(device_seconds)))
    price_seconds = _ROUNDING.multiply(price.device_hour, seconds)
    return _ROUNDING.quantize(_ROUNDING.divide(price_seconds, _SECONDS_AN_HOUR), DEVICE_COST_QUANTUM)


def amortised_hour(purchase_price: Decimal, years: Decimal, watts: Decimal, price_per_kwh: Decimal) -> Decimal:
    """What an hour of one's own device costs: its price over the hours it will be used, and its power.

    A year has 8766 hours. Rounded half-even to DEVICE_COST_QUANTUM, because a year's share has no finite decimal.
    Raises ValueError unless `years` is above 0 and the rest is finite and 0 or more.
    """
    refuse_bad_money(purchase_price=purchase_price, watts=watts, price_per_kwh=price_per_kwh)
    if not (years.is_finite() and years > 0):
        raise ValueError(f"years is {years}: how long a device is used must be more than 0 years")
    hardware = _ROUNDING.divide(purchase_price, _ROUNDING.multiply(years, _HOURS_A_YEAR))
    power = _ROUNDING.multiply(_ROUNDING.scaleb(watts, -3), price_per_kwh)
    return _ROUNDING.normalize(_ROUNDING.quantize(_ROUNDING.add(hardware, power), DEVICE_COST_QUANTUM))


def total(amounts: Iterable[Decimal | None]) -> Decimal | None:
    """Exact sum; None (unknown) when one of them is unknown. The sum of nothing is 0."""
    result: Decimal | None = None
    for amount in amounts:
        if amount is None:
            return None
        result = amount if result is None else EXACT.add(result, amount)
    return Decimal(0) if result is None else result


def add_up(amounts: Iterable[Decimal]) -> Decimal:
    """Exact sum of amounts that are all known."""
    return reduce(EXACT.add, amounts, Decimal(0))


def worst_case(price: Price | None, prompt_tokens: int, max_output: int, images: int = 0) -> Decimal | None:
    """The most a call can be charged: every prompt token at the dearest input price, every output token likewise, and
    the parts for the request and its images.

    None when a class that the call could use has no price: such a call has no upper bound, so a hard budget refuses it.
    Raises ValueError on negative counts.
    """
    if prompt_tokens < 0 or max_output < 0:
        raise ValueError("token counts must be 0 or more")
    if price is None:
        return None if prompt_tokens or max_output else Decimal(0)
    millions = Decimal(0)
    for rate, count in ((price.dearest_input, prompt_tokens), (price.dearest_output, max_output)):
        if count:
            if rate is None:
                return None
            millions = _UP.add(millions, _UP.multiply(rate, Decimal(count)))
    amount = _UP.scaleb(millions, _PER_MILLION)
    if not _is_flat_in_part(price):
        return amount
    return _UP.add(amount, _flat(price, images, _UP))


def affordable_output(price: Price | None, prompt_tokens: int, remaining: Decimal, images: int = 0) -> int:
    """The largest output whose `worst_case` fits in `remaining`.

    0 also when even the prompt does not fit or a price is missing; UNLIMITED_OUTPUT when output is free or `remaining`
    has no end that matters.
    """
    prompt = worst_case(price, prompt_tokens, 0, images)
    rate = None if price is None else price.dearest_output
    if prompt is None or rate is None or prompt > remaining:
        return 0
    most = worst_case(price, prompt_tokens, UNLIMITED_OUTPUT, images)
    if most is None or remaining >= most:
        return UNLIMITED_OUTPUT
    millionths = _DOWN.scaleb(_DOWN.subtract(remaining, prompt), -_PER_MILLION)
    return int(_DOWN.divide_int(millionths, rate))


def _is_flat_in_part(price: Price) -> bool:
    """Whether it has parts that do not depend on tokens."""
    return price.per_request is not None or price.per_image is not None


def _flat(price: Price, images: int, context: Context) -> Decimal:
    """The parts that do not depend on tokens."""
    by_image = context.multiply(price.per_image or Decimal(0), Decimal(images))
    return context.add(price.per_request or Decimal(0), by_image)
