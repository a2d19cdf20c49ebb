"""What an orchestrator and a scraper ask: is the process alive, can it serve, what are its numbers."""

import asyncio
from collections.abc import Collection

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler
from prometheus_client import generate_latest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ledger import Ledger
from gateway.database import reachable
from gateway.errors import ApiError
from gateway.live import Live
from gateway.prices import Prices
from gateway.telemetry import Metrics

MIN_FREE_BYTES = 16 * 1024 * 1024


class Readiness:
    """Checks the database, the upstreams and the ledger; none of them for longer than a few seconds.

    An upstream that is away is a reason where a model has no other one.
    """

    def __init__(self, engine: AsyncEngine, live: Live, prices: Prices, ledger: Ledger) -> None:
        self._engine = engine
        self._live = live
        self._prices = prices
        self._ledger = ledger

    async def reasons(self) -> dict[str, str]:
        """What is missing to serve a request, by part; empty when nothing is."""
        asked = self._live.upstreams
        names = list(asked)
        database, *upstreams = await asyncio.gather(self._database(), *(asked[name].health() for name in names))
        found = {"database": database, "ledger": self._ledger_state()}
        away = {name: reason for name, reason in zip(names, upstreams, strict=True) if reason is not None}
        found |= {f"upstream {name}": away[name] for name in self._needed(away)}
        return {part: reason for part, reason in found.items() if reason is not None}

    def _needed(self, away: Collection[str]) -> list[str]:
        """Of the upstreams that are away, those of a model that no other upstream serves."""
        models = ({target.upstream for target in model.upstreams} for model in self._live.settings.models.values())
        return sorted({name for names in models if names <= set(away) for name in names})

    async def _database(self) -> str | None:
        try:
            async with reachable(), self._engine.connect() as connection:
                await connection.execute(text("SELECT 1"))
        except ApiError:
            return "does not answer"
        return None if self._prices.loaded else "answers, but the price book is not loaded yet"

    def _ledger_state(self) -> str | None:
        health = self._ledger.health()
        if health.free_bytes < MIN_FREE_BYTES:
            return f"only {health.free_bytes} bytes are free under the spool; make room"
        if health.last_error is not None:
            return f"{health.spooled} operations wait to be copied: {health.last_error}"
        return None


def health_routes(readiness: Readiness, metrics: Metrics) -> list[HTTPRouteHandler]:
    @get("/health/live", sync_to_thread=False)
    def live() -> dict[str, str]:
        return {"status": "ok"}

    @get("/health/ready")
    async def ready() -> Response[dict[str, object]]:
        reasons = await readiness.reasons()
        if not reasons:
            return Response({"status": "ok"})
        return Response({"status": "unavailable", "reasons": reasons}, status_code=503, headers={"retry-after": "2"})

    @get("/metrics", media_type="text/plain; version=0.0.4; charset=utf-8", sync_to_thread=False)
    def show_metrics() -> bytes:
        return generate_latest(metrics.registry)

    return [live, ready, show_metrics]
