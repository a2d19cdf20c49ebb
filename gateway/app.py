"""The composition root: every part of the gateway is made and joined here, and nowhere else."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import structlog
from litestar import Litestar
from litestar.exceptions import HTTPException

from billing.alerts import evaluation, outbox, pruning
from billing.alerts.checks.health import health_report
from billing.housekeeping import Housekeeping, Job
from billing.lease_cleanup import clean_up
from billing.leases import Leases
from billing.ledger import Ledger
from billing.notices import Notices
from billing.partitions import make_ahead
from billing.payloads import Payloads
from billing.retention import enforce
from billing.rollups import refresh
from billing.spool import Spool
from billing.wallets import expire_credit
from dashboards.web import COOKIE, Provider, ProviderSettings, Sessions, Throttle, create_router
from gateway.admin.access import Gate
from gateway.admin.app import create_admin, mounted
from gateway.admin.writing import forget_old_writes
from gateway.admission import Admission
from gateway.api.batches import batch_routes
from gateway.api.callers import AnyRequest
from gateway.api.files import file_routes
from gateway.api.health import Readiness, health_routes
from gateway.api.routes import http_error, models_route, surface_routes
from gateway.auth import Keys
from gateway.batches.runner import BatchRunner
from gateway.client_address import client_address
from gateway.database import connect
from gateway.device_meter import DeviceMeter
from gateway.dispatch import Dispatcher
from gateway.headers import read_headers
from gateway.keep_alive import KeepAlive
from gateway.live import Live
from gateway.pipeline import Pipeline
from gateway.prices import Prices
from gateway.reload import Reload
from gateway.rows import Rows
from gateway.settings import Settings
from gateway.telemetry import Metrics, Tracing

FINISH_SECONDS = 5.0
"""At the stop: how long requests that were cut off may take to write their rows, and the rows to reach the database."""

log = structlog.get_logger()


def create_app(settings: Settings, config: Path | None = None) -> Litestar:
    """The gateway as an ASGI application. It starts without the database or an upstream and serves when they come.

    `config`: the file that `settings` were read from, if it is to be read again when it changes.
    """
    engine = connect(settings.database_url.get_secret_value())
    spool = Spool(settings.data_dir / "spool")
    ledger = Ledger(engine, spool)
    live = Live(settings)
    notices = Notices(engine)
    keys = Keys(engine, notices)
    prices = Prices(engine, settings, notices)
    leases = Leases(engine, spool.replica, settings.currency, notices)
    dispatcher = Dispatcher(live)
    batches = BatchRunner(engine, live)
    devices = DeviceMeter(engine, live, prices)
    payloads = Payloads(engine)
    housekeeping = Housekeeping(
        engine,
        [
            Job("partitions", 600, make_ahead),
            Job("rollups", 60, refresh),
            Job("retention", 3600, partial(enforce, keep=settings.retention.keep())),
            Job("forget old writes", 3600, forget_old_writes),
            Job("alerts", evaluation.EVERY_SECONDS, evaluation.Evaluation().run),
            Job("alert outbox", outbox.EVERY_SECONDS, outbox.deliver),
            Job("forget old alerts", 3600, pruning.forget_old),
            health_report(spool),
            Job("clean up budgets", 3600, clean_up),
            Job("expire credit", 60, expire_credit),
        ],
    )
    keep_alive = KeepAlive(settings.limits.keep_alive_seconds)
    tracing, metrics = Tracing(), Metrics()
    metrics.watch(ledger, payloads)
    admission = Admission(leases, dispatcher)
    pipeline = Pipeline(
        live=live,
        keys=keys,
        prices=prices,
        admission=admission,
        dispatcher=dispatcher,
        rows=Rows(live, spool, admission, tracing, metrics),
        payloads=payloads,
        keep_alive=keep_alive,
        tracing=tracing,
        metrics=metrics,
    )

    admin_key_hash = bytes.fromhex(settings.admin_key_hash)
    sessions = Sessions(admin_key_hash)
    provider = _provider(settings)
    gate = Gate(engine, live, COOKIE, sessions.read, Throttle(allowed=20, seconds=60))

    @contextlib.asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        parts = (notices, prices, leases, ledger, keep_alive, housekeeping, devices, payloads)
        background = [asyncio.create_task(part.run()) for part in parts]
        if config is not None:
            background.append(asyncio.create_task(Reload(config, live, prices).run()))
        running_batches = asyncio.create_task(batches.run(app))
        try:
            yield
        finally:
            running_batches.cancel()
            await asyncio.wait({running_batches})
            await pipeline.finish(FINISH_SECONDS)
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await _drain(ledger, payloads)
            await leases.close()
            await spool.close()
            await live.close()
            if provider is not None:
                await provider.close()
            await engine.dispose()
            await asyncio.to_thread(tracing.close)  # it may wait for the collector

    return Litestar(
        route_handlers=[
            *surface_routes(pipeline),
            models_route(live, keys),
            file_routes(engine, live, keys),
            batch_routes(engine, live, keys, batches.wake),
            *health_routes(Readiness(engine, live, prices, ledger), metrics),
            create_router(engine, sessions, Throttle(), partial(_address_of, live), provider),
            mounted(create_admin(engine, admin_key_hash, gate)),
        ],
        lifespan=[lifespan],
        exception_handlers={HTTPException: http_error},
        openapi_config=None,
        logging_config=None,
    )


def _address_of(live: Live, request: AnyRequest) -> str:
    peer = (request.scope.get("client") or ("", 0))[0]
    return client_address(peer, read_headers(list(request.scope["headers"])), live.settings.trusted_proxies)


def _provider(settings: Settings) -> Provider | None:
    oidc = settings.oidc
    if oidc is None:
        return None
    return Provider(
        ProviderSettings(
            issuer=oidc.issuer,
            client_id=oidc.client_id,
            client_secret=oidc.client_secret(),
            redirect_uri=oidc.redirect_uri,
            allowed_domains=frozenset(domain.lower() for domain in oidc.allowed_domains),
            role_claim=oidc.role_claim,
            roles=oidc.roles,
        )
    )


async def _drain(ledger: Ledger, payloads: Payloads) -> None:
    try:
        async with asyncio.timeout(FINISH_SECONDS):
            await ledger.drain()
            await payloads.drain()
    except Exception as error:
        waiting = ledger.health().spooled
        log.warning(
            "the ledger could not be completed; the rest follows at the next start", rows=waiting, reason=repr(error)
        )
