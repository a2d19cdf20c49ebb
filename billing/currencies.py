"""The smallest coin of each currency, by ISO 4217: what an invoice's lines are rounded to."""

from decimal import ROUND_HALF_EVEN, Context, Decimal

from iso4217 import Currency

_ROUNDING = Context(prec=400, rounding=ROUND_HALF_EVEN)


def decimals(currency: str) -> int:
    """Of its smallest coin: USD 2, JPY 0, KWD 3. Raises ValueError where ISO 4217 has no such currency, or no coin."""
    try:
        found = Currency(currency)
    except ValueError:
        raise ValueError(f"{currency!r} is not a currency of ISO 4217, so nobody can say what to round it to") from None
    if found.exponent is None:
        raise ValueError(f"ISO 4217 gives {currency} no smallest coin, so nobody can say what to round it to")
    return found.exponent


def rounded(amount: Decimal, currency: str) -> Decimal:
    """To the smallest coin, half-even, with exactly its decimals. Raises ValueError as `decimals` does."""
    return _ROUNDING.quantize(amount, Decimal(1).scaleb(-decimals(currency)))
