"""The dashboard mounted alone, and a visitor to it."""

import hashlib
from typing import Any

import httpx
from litestar import Litestar, Request
from sqlalchemy.ext.asyncio import AsyncEngine

from dashboards.web import Provider, Sessions, Throttle, create_router

ADMIN_KEY = "fa-the-right-key"
KEY_HASH = hashlib.sha256(ADMIN_KEY.encode()).digest()
ORIGIN = "http://farthing.test"


def peer(request: Request[Any, Any, Any]) -> str:
    return request.client.host if request.client else "unknown"


def mount(engine: AsyncEngine, provider: Provider | None = None) -> Litestar:
    return Litestar([create_router(engine, Sessions(KEY_HASH), Throttle(), peer, provider)])


def visitor(app: Litestar, address: str = "127.0.0.1") -> httpx.AsyncClient:
    """A browser-like client that is not signed in."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(address, 123)), base_url=ORIGIN)


async def sign_in(client: httpx.AsyncClient, key: str = ADMIN_KEY, **fields: str) -> httpx.Response:
    return await client.post("/dashboard/sign-in", data={"key": key, **fields})
