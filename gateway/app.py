"""The composition root: every part of the gateway is made and joined here, and nowhere else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog
from litestar import Litestar
from litestar.exceptions import HTTPException

from billing.leases import Budgets
from billing.ledger import Ledger
from billing.spool import Spool
from dashboards.web import create_router
from gateway.admission import Admission
from gateway.api.health import Readiness, health_routes
from gateway.api.routes import http_error, openai_routes
from gateway.auth import Keys
from gateway.database import connect
from gateway.dispatch import Dispatcher
from gateway.pipeline import Pipeline
from gateway.prices import Prices
from gateway.routing.rules import RulesRouter
from gateway.settings import Settings
from gateway.telemetry import Metrics, Tracing
from gateway.upstreams.upstream import Upstream

FINISH_SECONDS = 5.0
"""At the stop: how long requests that were cut off may take to write their rows, and the rows to reach the database."""

log = structlog.get_logger()


def create_app(settings: Settings) -> Litestar:
    """The gateway as an ASGI application. It starts without the database or an upstream and serves when they come."""
    engine = connect(settings.database_url.get_secret_value())
    spool = Spool(settings.data_dir / "spool")
    ledger = Ledger(engine, spool)
    upstreams = {name: Upstream(name, upstream) for name, upstream in settings.upstreams.items()}
    keys = Keys(engine)
    prices = Prices(engine, settings)
    dispatcher = Dispatcher(settings, upstreams)
    tracing, metrics = Tracing(), Metrics()
    pipeline = Pipeline(
        settings=settings,
        keys=keys,
        router=RulesRouter(settings.router.threshold),
        prices=prices,
        admission=Admission(Budgets(engine, spool.replica, settings.currency), dispatcher),
        dispatcher=dispatcher,
        spool=spool,
        tracing=tracing,
        metrics=metrics,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        background = [asyncio.create_task(prices.run()), asyncio.create_task(ledger.run())]
        try:
            yield
        finally:
            await pipeline.finish(FINISH_SECONDS)
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await _drain(ledger)
            await spool.close()
            for upstream in upstreams.values():
                await upstream.close()
            await engine.dispose()
            await asyncio.to_thread(tracing.close)  # it may wait for the collector

    return Litestar(
        route_handlers=[
            *openai_routes(settings, keys, pipeline, upstreams),
            *health_routes(Readiness(engine, upstreams, prices, ledger), metrics),
            create_router(engine, bytes.fromhex(settings.admin_key_hash)),
        ],
        lifespan=[lifespan],
        exception_handlers={HTTPException: http_error},
        openapi_config=None,
        logging_config=None,
    )


async def _drain(ledger: Ledger) -> None:
    try:
        async with asyncio.timeout(FINISH_SECONDS):
            await ledger.drain()
    except Exception as error:
        waiting = ledger.health().spooled
        log.warning(
            "the ledger could not be completed; the rest follows at the next start", rows=waiting, reason=repr(error)
        )
