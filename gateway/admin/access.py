"""Who asks, and what each route lets them do: declared beside the route (`opt=needs(…)`), enforced before it runs.

A caller is known by a token (`Authorization: Bearer …`: the gateway's admin key, or one of `farthing admins token`), or
by the dashboard's cookie. A browser sends that cookie by itself, so a write that comes with it must say that it comes
from our own pages.
"""

import hashlib
import hmac
import math
from collections.abc import Callable
from typing import Any, Protocol
from uuid import UUID

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.administrators import TOKEN_PREFIX, find_caller, find_token
from billing.roles import OWNER, RIGHTS, Caller, Right
from gateway.client_address import client_address
from gateway.database import reachable
from gateway.errors import ApiError
from gateway.headers import read_headers
from gateway.live import Live

Connection = ASGIConnection[Any, Any, Any, Any]
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_MOST_CHARACTERS = 200


class Throttle(Protocol):
    """The brake on guessing; `dashboards.web.session` has it."""

    def wait_seconds(self, address: str) -> float: ...
    def failed(self, address: str) -> None: ...
    def succeeded(self, address: str) -> None: ...


def needs(right: Right, *, everywhere: bool = False) -> dict[str, Any]:
    """What a route asks of its callers. `everywhere`: an administrator of one organisation is refused."""
    return {"right": right, "everywhere": everywhere}


class Gate:
    """Lets callers in. `cookie`: the session's name; `read_session`: whom its value stands for, None if it is void."""

    def __init__(
        self,
        engine: AsyncEngine,
        live: Live,
        cookie: str,
        read_session: Callable[[str], str | None],
        throttle: Throttle,
    ) -> None:
        self._engine = engine
        self._live = live
        self._cookie = cookie
        self._read_session = read_session
        self._throttle = throttle

    async def admit(self, connection: Connection, handler: BaseRouteHandler) -> None:
        """Raises ApiError 401 (who are you), 403 (you may not), 429 (too many wrong tokens)."""
        right = handler.opt.get("right")
        if right is None:
            raise ApiError(403, "forbidden", "Nobody may use this route: it does not say who may.")
        caller = await self._caller(connection)
        if not caller.may(right):
            allowed = ", ".join(role for role, rights in RIGHTS.items() if right in rights)
            text = f"A {caller.role} may not do this; it needs one of the roles: {allowed}."
            raise ApiError(403, "forbidden", text)
        if handler.opt["everywhere"] and caller.org_id is not None:
            text = "This concerns all organisations, and you look after one. Ask an administrator of all."
            raise ApiError(403, "forbidden", text)
        connection.state.caller = caller

    async def _caller(self, connection: Connection) -> Caller:
        headers = read_headers(list(connection.scope["headers"]))
        peer = (connection.scope.get("client") or ("", 0))[0]
        authorization = headers.get("authorization")
        if authorization is not None:
            address = client_address(peer, headers, self._live.settings.trusted_proxies)
            return await self._by_token(authorization, address)
        cookie = connection.cookies.get(self._cookie)
        person = None if cookie is None else self._read_session(cookie)
        if person is None:
            raise _who("Send a token as `Authorization: Bearer …`; `farthing admins token` makes one.")
        if connection.scope.get("method") not in SAFE_METHODS:
            _refuse_other_sites(headers)
        async with reachable(), self._engine.connect() as conn:
            caller = await find_caller(conn, person)
        if caller is None:
            raise _who("This session has ended. Sign in again.")
        return caller

    async def _by_token(self, authorization: str, address: str) -> Caller:
        wait = self._throttle.wait_seconds(address)
        if wait > 0:
            seconds = math.ceil(wait)
            text = f"Too many wrong tokens from your address. Try again in {seconds} seconds."
            raise ApiError(429, "too_many_wrong_tokens", text, headers={"retry-after": str(seconds)})
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        caller = None
        if scheme.lower() == "bearer" and 0 < len(token) <= _MOST_CHARACTERS:
            caller = await self._known(token)
        if caller is None:
            self._throttle.failed(address)
            raise _who(
                "The token is wrong or has ended. Send `Authorization: Bearer` with the admin key or a token that"
                " `farthing admins token` made; the keys of users (fk-…) administer nothing."
            )
        self._throttle.succeeded(address)
        return caller

    async def _known(self, token: str) -> Caller | None:
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        if hmac.compare_digest(digest, bytes.fromhex(self._live.settings.admin_key_hash)):
            return OWNER
        if not token.startswith(TOKEN_PREFIX):
            return None
        async with reachable(), self._engine.connect() as conn:
            return await find_token(conn, token)


def refuse_other_org(caller: Caller, org_id: UUID | None) -> None:
    """404 for what is not the caller's to see, as if it were not there. `org_id` None: everybody's, like a model."""
    if caller.org_id is None or caller.org_id == org_id:
        return
    if org_id is None:
        text = "This concerns all organisations, and you look after one. Ask an administrator of all."
        raise ApiError(403, "forbidden", text)
    raise ApiError(404, "not_found", "There is no such thing in your organisation.")


def _refuse_other_sites(headers: dict[str, str]) -> None:
    """403 unless the browser says that our own page sent this: with a cookie alone, any site's form could have."""
    sender, origin = headers.get("sec-fetch-site"), headers.get("origin")
    ours = origin is not None and origin.partition("://")[2] == headers.get("host")
    if sender != "same-origin" and not (sender is None and ours):
        text = "With the dashboard's cookie, writes are taken from the dashboard's own pages only. Use a token."
        raise ApiError(403, "other_site", text)


def _who(text: str) -> ApiError:
    return ApiError(401, "unauthorized", text, headers={"www-authenticate": "Bearer"})
