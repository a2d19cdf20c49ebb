"""How numbers look: money exact and never scientific, counts grouped by thousands, times in the unit that fits."""

from collections.abc import Iterable
from datetime import datetime
from decimal import ROUND_HALF_EVEN, Context, Decimal

PLACES = 6  # what tables show; a smaller amount than that shows all its digits

_WIDE = Context(prec=100, rounding=ROUND_HALF_EVEN)  # the default context would round sums of more than 28 digits


def exact(amount: Decimal, places: int = 2) -> str:
    """All digits of `amount`, thousands grouped, at least `places` decimals: `1,234.50`, `0.0000001`."""
    whole, _, decimals = format(amount, ",f").partition(".")
    return f"{whole}.{decimals.rstrip('0').ljust(places, '0')}"


def precise(amount: Decimal, places: int = 2) -> str:
    """`amount` with no more than 12 significant digits, but its whole part in full; else as `exact` shows it."""
    rounded = _WIDE.quantize(amount, Decimal(1).scaleb(-max(2, 11 - amount.adjusted())))
    return exact(amount, places) if rounded == amount else exact(rounded)


def places(amounts: Iterable[Decimal | None]) -> int:
    """The decimals that `precise` needs for the longest of `amounts`: with so many, a column lines up."""
    return max((len(precise(amount).partition(".")[2]) for amount in amounts if amount is not None), default=2)


def aligned(amount: Decimal) -> str:
    """`amount` with six decimals, so that a column lines up; with all of them where six would show zero."""
    rounded = _WIDE.quantize(amount, Decimal(1).scaleb(-PLACES))
    if amount and not rounded:
        return exact(amount)
    return format(rounded if rounded else abs(rounded), ",f")


def short(amount: Decimal) -> str:
    """`amount` with six decimals or four significant digits, whichever are more; trailing zeros left out."""
    if not amount:
        return exact(amount)
    return exact(_WIDE.quantize(amount, Decimal(1).scaleb(-max(PLACES, 3 - amount.adjusted()))))


def plain(amount: Decimal) -> str:
    """`amount` for a machine: all digits, no grouping."""
    return format(amount, "f")


def percent(part: int | Decimal, whole: int | Decimal) -> str | None:
    """`37.5%`; None when the whole is zero. Neither 0% nor 100% is shown for what only rounds to it."""
    if not whole:
        return None
    share = _WIDE.divide(Decimal(part) * 100, Decimal(whole))
    rounded = share.quantize(Decimal("0.1"), context=_WIDE)
    if share and not rounded:
        return "<0.1%" if share > 0 else ">-0.1%"
    if share < 100 and rounded == 100:
        return ">99.9%"
    return f"{rounded}%"


def count(number: int) -> str:
    return f"{number:,}"


def duration(seconds: float) -> str:
    """`340 µs`, `1.3 ms`, `812 ms`, `1.24 s`, `2 min 5 s`."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.1f} ms" if seconds < 0.00995 else f"{seconds * 1e3:.0f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s"


def clock(at: datetime) -> str:
    """`2026-11-29 14:40:12`; the page says that times are UTC."""
    return f"{at:%Y-%m-%d %H:%M:%S}"
