"""How the command line shows numbers to people: money never scientific, unknown never as zero."""

from decimal import ROUND_HALF_EVEN, Context, Decimal

_WIDE = Context(prec=100, rounding=ROUND_HALF_EVEN)  # the default context would round sums of more than 28 digits
PLACES = Decimal("0.000001")


def money(amount: Decimal | None) -> str:
    """Six decimals, so that a column lines up; all of them where six would show zero. JSON has every digit."""
    if amount is None:
        return "unknown"
    rounded = _WIDE.quantize(amount, PLACES)
    if amount and not rounded:
        return f"{amount:,f}"
    return f"{rounded or abs(rounded):,f}"  # abs: there is a -0


def exact(amount: Decimal) -> str:
    """Every digit there is, without trailing zeros."""
    shown = f"{amount:f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def percent(share: Decimal | None) -> str:
    """One decimal; empty where there is no share."""
    return "" if share is None else f"{_WIDE.quantize(share * 100, Decimal('0.1'))}%"
