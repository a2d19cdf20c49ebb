"""The OpenAI-compatible routes, on raw ASGI: the pipeline watches the socket itself."""

import asyncio
from collections.abc import Mapping
from typing import Any

from litestar import Request, Response, asgi
from litestar.exceptions import HTTPException
from litestar.handlers import ASGIRouteHandler
from litestar.types import Receive, Scope, Send

from gateway.api.openai import error_body, model_list
from gateway.auth import Keys
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.pipeline import Pipeline
from gateway.settings import Settings
from gateway.upstreams.upstream import Upstream


def openai_routes(
    settings: Settings, keys: Keys, pipeline: Pipeline, upstreams: Mapping[str, Upstream]
) -> list[ASGIRouteHandler]:
    @asgi("/v1/chat/completions", copy_scope=False)
    async def chat_completions(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        if await _allowed(exchange, "POST"):
            await pipeline.chat(exchange)

    @asgi("/v1/models", copy_scope=False)
    async def models(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        if not await _allowed(exchange, "GET"):
            return
        try:
            await keys.authenticate(exchange.headers.get("authorization"))
        except ApiError as error:
            await exchange.respond(error.status, error.headers, error_body(error))
        else:
            found = await asyncio.gather(*(upstream.hosted() for upstream in upstreams.values()))
            hosted = dict(zip(upstreams, found, strict=True))
            await exchange.respond(200, {}, model_list(settings, hosted))

    return [chat_completions, models]


async def _allowed(exchange: Exchange, method: str) -> bool:
    if exchange.method == method:
        return True
    error = ApiError(405, "method_not_allowed", f"Use {method} here, not {exchange.method}.", headers={"allow": method})
    await exchange.respond(error.status, error.headers, error_body(error))
    return False


def http_error(_: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """Litestar's own refusals (no such path, …) in OpenAI's shape."""
    words = ApiError(error.status_code, None, error.detail or "The request was refused.")
    return Response(
        error_body(words), status_code=error.status_code, headers=error.headers, media_type="application/json"
    )
