"""Amounts and shares as a sentence says them."""

from decimal import Decimal


def amount(value: Decimal, currency: str) -> str:
    """Two decimals, or two digits where that would show nothing."""
    shown = f"{value:,.2f}" if abs(value) >= Decimal("0.1") or not value else f"{value:.2g}"
    return f"{shown} {currency}"


def percent(share: Decimal | float) -> str:
    return f"{share:.1%}" if 0 < share < Decimal("0.1") else f"{share:.0%}"
