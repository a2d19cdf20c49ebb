"""The price book in memory: configured prices are seeded into price versions once, then the book is kept fresh.

A version to come is known beforehand and takes effect at its moment by the database's clock, also while that is away.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.audit import act_as
from billing.notices import Notices
from billing.prices import PRICES_CHANNEL, PriceBook, PriceTerms, load, seed
from gateway.database import transaction
from gateway.errors import ApiError, unavailable
from gateway.settings import ClassPrices, Settings

RELOAD_SECONDS = 30.0
"""How soon a price changed in the database by somebody else is used, where no notice of it came."""
RETRY_SECONDS = 0.5

log = structlog.get_logger()


def configured(settings: Settings) -> list[PriceTerms]:
    """The configuration's prices as price book entries; a model without one is entered as unpriced.

    Raises ValueError on a price the book would not take.
    """
    terms = []
    for name, upstream in settings.upstreams.items():
        if upstream.kind == "engine":
            terms.append(_terms(settings, {"device_hour": upstream.device_hour}, book="cost", model="", upstream=name))
    for name, model in settings.models.items():
        for tier, sale in (("standard", model.price), ("batch", model.batch_price), ("priority", model.priority_price)):
            terms.append(_terms(settings, _given(sale), book="sale", model=name, tier=tier))
        for target in model.upstreams:
            for tier, cost in (("standard", target.cost), ("priority", target.priority_cost)):
                names = {"model": name, "upstream": target.upstream, "tier": tier}
                terms.append(_terms(settings, _given(cost), book="cost", **names))
    return terms


def _given(prices: ClassPrices | None) -> Mapping[str, Decimal | None]:
    return {} if prices is None else prices.complete()


def _terms(settings: Settings, prices: Mapping[str, Decimal | None], **names: str) -> PriceTerms:
    return msgspec.convert({"currency": settings.currency, **names, **prices}, PriceTerms)


class Prices:
    def __init__(self, engine: AsyncEngine, settings: Settings, notices: Notices) -> None:
        self._engine = engine
        self._configured = configured(settings)
        self._currency = settings.currency
        self._book: PriceBook | None = None
        self._read_at = 0.0
        """When the book was, by time.monotonic(): it knows the database's time of that moment."""
        self._changed = asyncio.Event()
        notices.subscribe(PRICES_CHANNEL, lambda _: self._changed.set())

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
        await self._read(configured(settings))
        self._configured = configured(settings)

    async def run(self) -> None:
        """Seed, then keep the book fresh, for ever; outlives a database that is away."""
        seeded = False
        while True:
            self._changed.clear()
            try:
                await self._read([] if seeded else self._configured)
                seeded = True
            except ApiError as error:
                log.warning("price book not read", reason=error.message)
                self._take_effect()
            pause = RELOAD_SECONDS if seeded else RETRY_SECONDS
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(pause, self._next_change()))

    async def _read(self, wanted: list[PriceTerms]) -> None:
        async with transaction(self._engine) as connection:
            if wanted:
                await act_as(connection, "gateway")
                await seed(connection, wanted)
            self._book = await load(connection, self._currency)
            self._read_at = time.monotonic()

    def _take_effect(self) -> None:
        """Without the database: what was to come by now is in force."""
        book = self._book
        if book is not None and self._next_change() <= 0:
            elapsed = time.monotonic() - self._read_at
            self._book = book.at(book.now + timedelta(seconds=elapsed))
            self._read_at += elapsed

    def _next_change(self) -> float:
        """Seconds until a version to come takes effect; 0 or less when it has."""
        book = self._book
        if book is None or book.next_change is None:
            return float("inf")
        return (book.next_change - book.now).total_seconds() - (time.monotonic() - self._read_at)
