"""Which path speaks which wire format. On raw ASGI: the pipeline reads the body and writes the answer itself."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Request, Response, asgi
from litestar.exceptions import HTTPException
from litestar.handlers import ASGIRouteHandler
from litestar.types import Receive, Scope, Send

from gateway.api.chat import ChatSurface
from gateway.api.completions import CompletionsSurface
from gateway.api.count_tokens import CountTokensSurface
from gateway.api.embeddings import EmbeddingsSurface
from gateway.api.messages import MessagesSurface
from gateway.api.messages_output import error_body as messages_error_body
from gateway.api.openai import error_body, model_list, model_names, model_object
from gateway.api.responses import ResponsesSurface
from gateway.api.surface import Surface
from gateway.attribution import refuse_addresses
from gateway.auth import Keys, check_route
from gateway.client_address import client_address
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.live import Live
from gateway.pipeline import Pipeline

SURFACES: dict[str, Surface] = {
    "/v1/chat/completions": ChatSurface(),
    "/v1/completions": CompletionsSurface(),
    "/v1/embeddings": EmbeddingsSurface(),
    "/v1/responses": ResponsesSurface(),
    "/v1/messages": MessagesSurface(),
}
COUNT_TOKENS = CountTokensSurface()


def surface_routes(pipeline: Pipeline) -> list[ASGIRouteHandler]:
    def served(surface: Surface) -> Callable[[Exchange], Awaitable[None]]:
        return lambda exchange: pipeline.serve(exchange, surface)

    routes = [_post(path, surface.error, served(surface)) for path, surface in SURFACES.items()]
    counted = _post(
        "/v1/messages/count_tokens", COUNT_TOKENS.error, lambda exchange: pipeline.count_tokens(exchange, COUNT_TOKENS)
    )
    return [*routes, counted]


def models_route(live: Live, keys: Keys) -> ASGIRouteHandler:
    """The list, and each of its entries by its name, which may have slashes."""

    @asgi("/v1/models", is_mount=True, copy_scope=False)
    async def models(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        error_bytes = messages_error_body if "anthropic-version" in exchange.headers else error_body
        if exchange.method != "GET":
            await _wrong_method(exchange, "GET", error_bytes)
            return
        name = scope["path"].strip("/")  # behind the mount
        settings = live.settings
        try:
            address = client_address(exchange.peer_address, exchange.headers, settings.trusted_proxies)
            principal = await keys.authenticate(exchange.headers, address)
            check_route(principal, "models")
            refuse_addresses(exchange.headers)
            upstreams = live.upstreams
            found = await asyncio.gather(*(upstream.hosted() for upstream in upstreams.values()))
            offered = model_names(settings, dict(zip(upstreams, found, strict=True)), principal.models)
            body = model_object(name, offered) if name else model_list(offered)
        except ApiError as error:
            await exchange.respond(error.status, error.headers, error_bytes(error))
        else:
            await exchange.respond(200, {}, body)

    return models


def _post(
    path: str, error_bytes: Callable[[ApiError], bytes], serve: Callable[[Exchange], Awaitable[None]]
) -> ASGIRouteHandler:
    @asgi(path, copy_scope=False)
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        if exchange.method == "POST":
            await serve(exchange)
        else:
            await _wrong_method(exchange, "POST", error_bytes)

    return handler


async def _wrong_method(exchange: Exchange, method: str, error_bytes: Callable[[ApiError], bytes]) -> None:
    error = ApiError(405, "method_not_allowed", f"Use {method} here, not {exchange.method}.", headers={"allow": method})
    await exchange.respond(error.status, error.headers, error_bytes(error))


def http_error(_: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """Litestar's own refusals (no such path, …) in OpenAI's shape."""
    words = ApiError(error.status_code, None, error.detail or "The request was refused.")
    return Response(
        error_body(words), status_code=error.status_code, headers=error.headers, media_type="application/json"
    )
