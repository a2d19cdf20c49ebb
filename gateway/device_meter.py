"""What the devices under our engines cost by the hour: their own account, taken over into the database now and then."""

import asyncio
from typing import NoReturn

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.devices import take_over
from gateway.database import transaction
from gateway.errors import ApiError
from gateway.live import Live
from gateway.prices import Prices
from gateway.upstreams.transport import BrokenError, UnreachableError
from gateway.upstreams.upstream import Upstream

EVERY_SECONDS = 15.0
"""What an engine did after the last look, and before it died, is not seen."""

log = structlog.get_logger()


class DeviceMeter:
    """Each replica looks at the engines of its own configuration; an engine that several look at counts once."""

    def __init__(self, engine: AsyncEngine, live: Live, prices: Prices) -> None:
        self._engine = engine
        self._live = live
        self._prices = prices

    async def run(self) -> NoReturn:
        """Look, for ever; outlives engines and a database that are away."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            for upstream in list(self._live.upstreams.values()):
                if upstream.is_engine:
                    await self._look(upstream)

    async def _look(self, upstream: Upstream) -> None:
        try:
            account = await upstream.device()
            if account is not None:
                price = self._prices.book().device(upstream.name)
                async with transaction(self._engine) as connection:
                    await take_over(
                        connection,
                        upstream.name,
                        account.instance,
                        wall_seconds=account.wall_seconds,
                        idle_seconds=account.idle_seconds,
                        price=price,
                        currency=self._live.settings.currency,
                    )
        except (UnreachableError, BrokenError, ApiError):
            pass  # the next look takes over what this one missed
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("the engine's account of its device was not understood", upstream=upstream.name, why=str(error))
