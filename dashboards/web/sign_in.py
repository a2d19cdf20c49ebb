"""Sign in with the admin key, sign out; who is not signed in is sent here."""

import math
import re
from typing import Any
from urllib.parse import parse_qs, urlencode

from litestar import Request, Response, get, post
from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie
from litestar.di import NamedDependency
from litestar.exceptions import PermissionDeniedException
from litestar.handlers import BaseRouteHandler
from litestar.response import Redirect
from litestar.types import Guard

from dashboards.web.session import COOKIE, LIFETIME_SECONDS
from dashboards.web.site import BASE, AnyRequest, Site

SIGN_IN = f"{BASE}/sign-in"

_OWN_PAGE = re.compile(rf"{BASE}(/[A-Za-z0-9/-]*)?(\?[A-Za-z0-9=&-]*)?")  # nothing that could lead elsewhere
_FORM_BYTES = 4096


class NotSignedInError(Exception):
    """The page needs a session. `page` is where to go on after signing in."""

    def __init__(self, page: str) -> None:
        self.page = page


def session_guard(site: Site) -> Guard:
    """The guard of every page that shows data: it raises NotSignedInError."""

    def require_session(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        if not site.sessions.valid(connection.cookies.get(COOKIE, "")):
            query = connection.scope["query_string"].decode("latin-1")
            path = connection.scope["path"]
            raise NotSignedInError(f"{path}?{query}" if query else path)

    return require_session


def to_sign_in(_: AnyRequest, error: NotSignedInError) -> Redirect:
    """Answer a NotSignedInError."""
    page = _own_page(error.page)
    query = "" if page == BASE else "?" + urlencode({"next": page})
    return Redirect(SIGN_IN + query, status_code=303)


@get("/sign-in", sync_to_thread=False)
def sign_in_page(request: AnyRequest, site: NamedDependency[Site]) -> Response[str]:
    """The form."""
    return site.page("sign_in.html", next=_own_page(request.query_params.get("next", BASE)), error=None)


@post("/sign-in", request_max_body_size=_FORM_BYTES)
async def sign_in(request: AnyRequest, site: NamedDependency[Site]) -> Response[Any]:
    """Check the key, set the cookie, go on to the page that was asked for."""
    _refuse_other_sites(request)
    form = parse_qs((await request.body()).decode("utf-8", "replace"))
    page = _own_page(form.get("next", [BASE])[0])
    address = request.client.host if request.client else "unknown"
    wait = site.throttle.wait_seconds(address)
    if wait > 0:
        message = f"Too many failed attempts from your address. Try again in {math.ceil(wait / 60)} min."
        return site.page("sign_in.html", 429, {"retry-after": str(math.ceil(wait))}, next=page, error=message)
    if not site.sessions.key_matches(form.get("key", [""])[0].strip()):
        site.throttle.failed(address)
        return site.page("sign_in.html", 401, next=page, error="That is not the admin key.")
    site.throttle.succeeded(address)
    cookie = _cookie(request, site.sessions.issue(), LIFETIME_SECONDS)
    return Redirect(page, status_code=303, cookies=[cookie])


@post("/sign-out")
async def sign_out(request: AnyRequest) -> Redirect:
    """Take the cookie back."""
    _refuse_other_sites(request)
    return Redirect(SIGN_IN, status_code=303, cookies=[_cookie(request, "", 0)])


def _cookie(request: AnyRequest, value: str, seconds: int) -> Cookie:
    """SameSite=Lax: a link to an operation from a chat works, a form on another site does not."""
    secure = request.url.scheme == "https"
    return Cookie(COOKIE, path=BASE, value=value, max_age=seconds, secure=secure, httponly=True, samesite="lax")


def _own_page(page: str) -> str:
    return page if _OWN_PAGE.fullmatch(page) else BASE


def _refuse_other_sites(request: Request[Any, Any, Any]) -> None:
    """Raises PermissionDeniedException when the browser says that another site's page sent this form.

    Every browser sends at least one of the two headers with a POST. A client that sends neither is no browser and
    carries no operator's cookie by accident.
    """
    sender = request.headers.get("sec-fetch-site")
    if sender is not None:
        same = sender in ("same-origin", "none")
    else:
        origin = request.headers.get("origin")
        same = origin is None or origin.partition("://")[2] == request.headers.get("host")
    if not same:
        raise PermissionDeniedException("This form was sent by another site. Open the dashboard and try again.")
