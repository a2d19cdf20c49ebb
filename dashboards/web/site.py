"""What every page needs: the database, the templates, the sessions and who they belong to."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from litestar import Request, Response
from litestar.enums import MediaType
from markupsafe import Markup
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.administrators import find_caller
from billing.audit import act_as
from billing.availability import is_away
from billing.roles import Caller
from dashboards.web import numbers, plotly_js
from dashboards.web.oidc import Provider
from dashboards.web.session import Sessions, Throttle

BASE = "/dashboard"
READ_SECONDS = 15.0  # a page that takes longer is answered as if PostgreSQL were away

AnyRequest = Request[Any, Any, Any]
AddressOf = Callable[[AnyRequest], str]
"""Which address a request comes from, proxies in front of us seen through: what counts for the brake on guessing."""

_HERE = Path(__file__).parent


class DatabaseAwayError(Exception):
    """PostgreSQL cannot be reached, refuses connections, or does not answer in time."""


class Site:
    """The composition of one mounted dashboard."""

    def __init__(
        self,
        engine: AsyncEngine,
        sessions: Sessions,
        throttle: Throttle,
        address_of: AddressOf,
        provider: Provider | None,
    ) -> None:
        self._engine = engine
        self._templates = _environment()
        self.sessions = sessions
        self.throttle = throttle
        self.provider_throttle = Throttle(allowed=20, seconds=60)
        self.address_of = address_of
        self.provider = provider

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection in one read-only snapshot, so that all numbers on a page agree. Raises DatabaseAwayError."""
        try:
            async with asyncio.timeout(READ_SECONDS), self._engine.connect() as connection:
                await connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
                yield connection
        except Exception as error:
            if is_away(error):
                raise DatabaseAwayError from error
            raise

    @asynccontextmanager
    async def write(self, actor: str) -> AsyncIterator[AsyncConnection]:
        """A transaction in which `actor` changes something. Raises DatabaseAwayError."""
        try:
            async with asyncio.timeout(READ_SECONDS), self._engine.begin() as connection:
                await act_as(connection, actor)
                yield connection
        except Exception as error:
            if is_away(error):
                raise DatabaseAwayError from error
            raise

    async def caller(self, cookie: str) -> Caller | None:
        """Whose session a cookie is now; None when it is void or its person revoked. Raises DatabaseAwayError."""
        person = self.sessions.read(cookie)
        if person is None:
            return None
        async with self.read() as connection:
            return await find_caller(connection, person)

    def page(
        self, template: str, status: int = 200, headers: dict[str, str] | None = None, **values: Any
    ) -> Response[str]:
        body = self._templates.get_template(template).render(values)
        return Response(body, status_code=status, media_type=MediaType.HTML, headers=headers)


@cache
def asset_version(path: Path) -> str:
    """Changes with the file's content, so that a browser may keep a file for ever."""
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()[:9]).decode()


def static_path(name: str) -> Path:
    return _HERE / "static" / name


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "aligned": numbers.aligned,
        "clock": numbers.clock,
        "count": numbers.count,
        "duration": numbers.duration,
        "exact": numbers.exact,
        "plain": numbers.plain,
        "precise": numbers.precise,
        "short": numbers.short,
        "script_json": _script_json,
    }
    environment.globals |= {
        "BASE": BASE,
        "percent": numbers.percent,
        "places": numbers.places,
        "asset": _asset,
        "plotly": plotly_js,
    }
    return environment


def _asset(name: str) -> str:
    return f"{BASE}/static/{name}?v={asset_version(static_path(name))}"


def _script_json(value: Any) -> Markup:
    """JSON that may stand inside a `<script type="application/json">` element: no `<` can end it."""
    text = msgspec.json.encode(value).decode()
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))  # noqa: S704
