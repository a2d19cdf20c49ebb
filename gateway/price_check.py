"""What is worth a word about the prices of a configuration: those that are missing, or unlike the public ones."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from billing.catalogue import CATALOGUE_CURRENCY, differences, public_price
from billing.prices import Price, PriceBook
from billing.records import TOKEN_CLASSES
from gateway.settings import Settings, TargetSettings
from gateway.upstreams.kinds import KINDS, KindName

_VENDORS: dict[KindName, str] = {
    "openai": "openai",
    "anthropic": "anthropic",
    "deepseek": "deepseek",
    "gemini": "google",
    "openrouter": "openrouter",
}
"""The catalogue's id of who is at a kind's usual address; elsewhere the address decides."""


def findings(settings: Settings, book: PriceBook, above: Decimal) -> list[dict[str, Any]]:
    """One row each: model, upstream, what, ours, public, percent. `above`: percent of difference.

    What an upstream costs is compared where the book says it, else what users are billed.
    """
    rows = []
    for name, model in settings.models.items():
        sale = book.sale(name)
        rows += [_row(name, None, what) for what in _missing(sale)]
        for target in model.upstreams:
            rows += _of_target(settings, book, name, target, sale, above)
    return rows


def _missing(sale: Price | None) -> Iterator[str]:
    if sale is None:
        yield "no price: its charge is unknown, and a hard budget refuses it"
        return
    missing = [name for name in TOKEN_CLASSES if getattr(sale, name) is None]
    if missing:
        yield f"no price for {', '.join(missing)}: a hard budget refuses it"


def _of_target(
    settings: Settings, book: PriceBook, name: str, target: TargetSettings, sale: Price | None, above: Decimal
) -> Iterator[dict[str, Any]]:
    upstream = settings.upstreams[target.upstream]
    cost = book.cost(name, target.upstream)
    if cost is None and upstream.kind != "openrouter":
        yield _row(name, target.upstream, "no cost: its margin is unknown")
    if upstream.kind not in _VENDORS:
        return
    vendor = _VENDORS[upstream.kind] if upstream.base_url == KINDS[upstream.kind].base_url else None
    public = public_price(vendor, upstream.base_url, target.upstream_model or name, book.now)
    ours = cost or sale
    if public is None:
        yield _row(name, target.upstream, "not in the public catalogue")
    elif ours is not None and ours.currency != CATALOGUE_CURRENCY:
        yield _row(name, target.upstream, f"not compared: the catalogue is in {CATALOGUE_CURRENCY}")
    elif ours is not None:
        what = "cost" if ours is cost else "sale price (no cost is known)"
        for found in differences(ours, public, above):
            yield _row(name, target.upstream, f"{what} of {found.token_class}", found.ours, found.public, found.percent)
        if public.rises is not None:
            words = f"its public price rises above {public.rises} input tokens, the book's does not"
            yield _row(name, target.upstream, words)


def _row(
    model: str,
    upstream: str | None,
    what: str,
    ours: Decimal | None = None,
    public: Decimal | None = None,
    percent: Decimal | None = None,
) -> dict[str, Any]:
    return {
        "model": model,
        "upstream": upstream,
        "what": what,
        "ours": ours,
        "public": public,
        "percent": None if percent is None else f"{percent:+.1f}",
    }
