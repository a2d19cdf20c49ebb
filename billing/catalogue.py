"""What the public catalogue of the package `genai-prices` says that a vendor charges: local data, no network.

Its prices are US dollars per million tokens and, by its own word, not always right: a difference is a question.
"""

from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import TieredPrices

from billing.prices import PriceTerms
from billing.records import TOKEN_CLASSES

CATALOGUE_CURRENCY = "USD"

_NAMES = {
    "input_fresh": ("input_mtok",),
    "input_cached": ("cache_read_mtok", "input_mtok"),
    "input_cache_write": ("cache_write_mtok", "input_mtok"),
    "output_text": ("output_mtok",),
    "output_reasoning": ("output_reasoning_mtok", "output_mtok"),
}
"""The catalogue's, by token class; of several the first that it has."""


class PublicPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What the catalogue has of a model."""

    provider: str
    model: str
    rates: dict[str, Decimal]
    """By token class, those that it has."""
    rises: int | None
    """From so many input tokens on, a prompt costs more than `rates`."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    token_class: str
    ours: Decimal | None
    public: Decimal
    percent: Decimal | None
    """Ours above (or, negative, below) the public one; None where either is missing or the public one is 0."""


def public_price(provider: str | None, base_url: str, model: str, at: datetime) -> PublicPrice | None:
    """By the vendor's id or, without one, its address; None where the catalogue does not know vendor or model."""
    snapshot = get_snapshot()
    try:
        found, entry = snapshot.find_provider_model(model, None, provider, None if provider else base_url)
    except LookupError:
        return None
    prices = entry.get_prices(at)
    rates, rises = {}, []
    for name, wanted in _NAMES.items():
        known: Any = next((price for each in wanted if (price := getattr(prices, each, None)) is not None), None)
        if isinstance(known, TieredPrices):
            rises += [tier.start for tier in known.tiers]
            known = known.base
        if known is not None:
            rates[name] = known
    return PublicPrice(provider=found.id, model=entry.id, rates=rates, rises=min(rises, default=None))


def differences(ours: PriceTerms, public: PublicPrice, above: Decimal) -> list[Difference]:
    """Of each class those that are more than `above` percent apart, or that we have no price for."""
    found = []
    for name in TOKEN_CLASSES:
        price, rate = getattr(ours, name), public.rates.get(name)
        if rate is None or price == rate:
            continue
        percent = None if price is None or not rate else (price - rate) / rate * 100
        if percent is None or abs(percent) > above:
            found.append(Difference(token_class=name, ours=price, public=rate, percent=percent))
    return found
