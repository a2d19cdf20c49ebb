"""How the gateway is served: uvicorn's server, our own connections, and a short way past the framework."""

import contextlib
import resource
from collections.abc import Callable
from typing import Any

import uvicorn
from litestar import Litestar
from litestar.routes import ASGIRoute
from uvicorn.server import ServerState

from gateway.api.routes import SURFACES
from gateway.caller_connection import KEEP_ALIVE_SECONDS, LINGER_SECONDS, CallerConnection
from gateway.rounds import Rounds
from gateway.settings import Settings

BACKLOG = 10_000
"""Connections that wait to be accepted; the kernel may allow fewer (net.core.somaxconn)."""
OPEN_FILES = 65_536
LOOKS = 4
"""At every connection within the shortest time that one is allowed for anything."""


def connections(app: Any, header_seconds: float, body_seconds: float) -> Callable[..., CallerConnection]:
    """What uvicorn makes of a new connection."""
    shortest = min(header_seconds, body_seconds, KEEP_ALIVE_SECONDS, LINGER_SECONDS)
    rounds: Rounds[CallerConnection] = Rounds(shortest / LOOKS)

    def connected(server_state: ServerState, app_state: dict[str, Any], **_: Any) -> CallerConnection:
        return CallerConnection(app, header_seconds, body_seconds, rounds, server_state, app_state)

    return connected


class Front:
    """The application, with a short way to the routes that need nothing of its framework."""

    def __init__(self, app: Litestar) -> None:
        self._app: Any = app
        self._direct: dict[str, Any] = {
            route.path: route.route_handler.fn
            for route in app.routes
            if isinstance(route, ASGIRoute) and route.path in SURFACES
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        handler = self._direct.get(scope["path"]) if scope["type"] == "http" else None
        await (handler or self._app)(scope, receive, send)


def config(app: Litestar, settings: Settings) -> uvicorn.Config:
    front = Front(app)
    made: Any = connections(front, settings.limits.header_seconds, settings.limits.body_seconds)
    return uvicorn.Config(
        front,
        http=made,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # anybody can send X-Forwarded-For; see gateway/client_address.py
        backlog=BACKLOG,
        timeout_graceful_shutdown=round(settings.limits.grace_seconds),
    )


def allow_many_connections() -> None:
    """Raise this process's own limit of open files as far as it may, so that thousands of streams fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
