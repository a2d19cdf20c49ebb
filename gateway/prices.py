"""The price book in memory: configured prices are seeded into price versions once, then the book is kept fresh."""

import asyncio
from collections.abc import Mapping
from decimal import Decimal

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.prices import PriceBook, PriceTerms, load, seed
from gateway.database import reachable
from gateway.errors import ApiError, unavailable
from gateway.settings import Settings

RELOAD_SECONDS = 30.0
"""How soon a price changed in the database by somebody else is used."""
RETRY_SECONDS = 0.5

log = structlog.get_logger()


def configured(settings: Settings) -> list[PriceTerms]:
    """The configuration's prices as price book entries; a model without one is entered as unpriced.

    Raises ValueError on a price the book would not take.
    """
    terms = []
    for name, model in settings.models.items():
        for tier, sale in (("standard", model.price), ("batch", model.batch_price)):
            price = sale.complete() if sale is not None else {}
            terms.append(_terms(settings, price, book="sale", model=name, tier=tier))
        for target in model.upstreams:
            upstream = settings.upstreams[target.upstream]
            cost: Mapping[str, Decimal | None] = {}
            if upstream.kind == "engine" and upstream.device_price_per_hour is not None:
                cost = {"device_hour": upstream.device_price_per_hour}
            elif target.cost is not None:
                cost = target.cost.complete()
            terms.append(_terms(settings, cost, book="cost", model=name, upstream=target.upstream))
    return terms


def _terms(settings: Settings, prices: Mapping[str, Decimal | None], **names: str) -> PriceTerms:
    return msgspec.convert({"currency": settings.currency, **names, **prices}, PriceTerms)


class Prices:
    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        self._engine = engine
        self._configured = configured(settings)
        self._book: PriceBook | None = None

    @property
    def loaded(self) -> bool:
        return self._book is not None

    def book(self) -> PriceBook:
        """Raises ApiError 503 until the database has answered once since the start."""
        if self._book is None:
            raise unavailable("The price book is not loaded yet: the ledger's database has not answered.")
        return self._book

    async def apply(self, settings: Settings) -> None:
        """Make another configuration's prices the ones in force; returns when they are. Raises ApiError 503.

        Raises ValueError on a price the book would not take.
        """
        wanted = configured(settings)
        async with reachable(), self._engine.begin() as connection:
            await seed(connection, wanted)
            self._book = await load(connection)
        self._configured = wanted

    async def run(self) -> None:
        """Seed, then keep the book fresh, for ever; outlives a database that is away."""
        seeded = False
        while True:
            try:
                async with reachable(), self._engine.begin() as connection:
                    if not seeded:
                        await seed(connection, self._configured)
                    self._book = await load(connection)
                seeded = True
            except ApiError as error:
                log.warning("price book not read", reason=error.message)
            await asyncio.sleep(RELOAD_SECONDS if seeded else RETRY_SECONDS)
