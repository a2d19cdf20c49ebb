"""Sign in with the admin key or through an OIDC provider, sign out; who is not signed in is sent here."""

import base64
import math
import re
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
import structlog
from litestar import Request, Response, get, post
from litestar.connection import ASGIConnection
from litestar.datastructures import Cookie
from litestar.di import NamedDependency
from litestar.exceptions import NotFoundException, PermissionDeniedException
from litestar.handlers import BaseRouteHandler
from litestar.response import Redirect
from litestar.types import Guard

from billing import administrators
from billing.administrators import ADMIN_KEY
from dashboards.web.oidc import AnswerError, Attempt, Provider, ProviderError
from dashboards.web.session import COOKIE, LIFETIME_SECONDS
from dashboards.web.site import BASE, AnyRequest, Site

SIGN_IN = f"{BASE}/sign-in"

_OWN_PAGE = re.compile(rf"{BASE}(/[A-Za-z0-9/-]*)?(\?[A-Za-z0-9=&-]*)?")  # nothing that could lead elsewhere
_FORM_BYTES = 4096
ATTEMPT_COOKIE = "farthing_sign_in"
ATTEMPT_SECONDS = 600
"""How long somebody may take at the provider."""

log = structlog.get_logger()


class NotSignedInError(Exception):
    """The page needs a session. `page` is where to go on after signing in."""

    def __init__(self, page: str) -> None:
        self.page = page


def session_guard(site: Site) -> Guard:
    """The guard of every page that shows data: it raises NotSignedInError, or says who asks (`state.caller`)."""

    async def require_session(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        caller = await site.caller(connection.cookies.get(COOKIE, ""))
        if caller is None:
            query = connection.scope["query_string"].decode("latin-1")
            path = connection.scope["path"]
            raise NotSignedInError(f"{path}?{query}" if query else path)
        connection.state.caller = caller

    return require_session


def to_sign_in(_: AnyRequest, error: NotSignedInError) -> Redirect:
    """Answer a NotSignedInError."""
    page = _own_page(error.page)
    query = "" if page == BASE else "?" + urlencode({"next": page})
    return Redirect(SIGN_IN + query, status_code=303)


@get("/sign-in", sync_to_thread=False)
def sign_in_page(request: AnyRequest, site: NamedDependency[Site]) -> Response[str]:
    """The form."""
    return _form(site, _own_page(request.query_params.get("next", BASE)))


@post("/sign-in", request_max_body_size=_FORM_BYTES)
async def sign_in(request: AnyRequest, site: NamedDependency[Site]) -> Response[Any]:
    """Check the key, set the cookie, go on to the page that was asked for."""
    _refuse_other_sites(request)
    form = parse_qs((await request.body()).decode("utf-8", "replace"))
    page = _own_page(form.get("next", [BASE])[0])
    address = site.address_of(request)
    if (wait := site.throttle.wait_seconds(address)) > 0:
        return _too_many(site, page, wait)
    if not site.sessions.key_matches(form.get("key", [""])[0].strip()):
        site.throttle.failed(address)
        return _form(site, page, "That is not the admin key.", 401)
    site.throttle.succeeded(address)
    cookie = _cookie(request, site.sessions.issue(ADMIN_KEY), LIFETIME_SECONDS)
    return Redirect(page, status_code=303, cookies=[cookie])


@get("/sign-in/provider")
async def to_provider(request: AnyRequest, site: NamedDependency[Site]) -> Response[Any]:
    """Send the browser to the OIDC provider, with a cookie that remembers what for."""
    page = _own_page(request.query_params.get("next", BASE))
    provider = _provider(site)
    address = site.address_of(request)
    if (wait := site.provider_throttle.wait_seconds(address)) > 0:
        return _too_many(site, page, wait)
    attempt = provider.new_attempt(page)
    try:
        url = await provider.authorization_url(attempt)
    except ProviderError as error:
        site.provider_throttle.failed(address)
        return _refused(site, page, error)
    sealed = site.sessions.seal("sign-in", _packed(attempt), ATTEMPT_SECONDS)
    cookie = _cookie(request, sealed, ATTEMPT_SECONDS, ATTEMPT_COOKIE, secure=_public_https(provider))
    return Redirect(url, status_code=303, cookies=[cookie])


@get("/sign-in/callback")
async def from_provider(request: AnyRequest, site: NamedDependency[Site]) -> Response[Any]:
    """Where the provider sends the browser back to: check what it says, find the administrator, set the cookie."""
    provider = _provider(site)
    payload = site.sessions.unseal("sign-in", request.cookies.get(ATTEMPT_COOKIE, ""))
    if payload is None:
        return _form(site, BASE, "That sign-in took too long, or began in another browser. Try again.", 401)
    attempt = msgspec.json.decode(base64.urlsafe_b64decode(payload), type=Attempt)
    address = site.address_of(request)
    if (wait := site.provider_throttle.wait_seconds(address)) > 0:
        return _too_many(site, attempt.page, wait)
    # Counted before the provider is asked: of many at once, only so many reach it. Who is let in takes it back.
    site.provider_throttle.failed(address)
    try:
        person = await provider.finish(attempt, dict(request.query_params))
        issuer = provider.settings.issuer
        async with site.write(f"oidc:{person.email or person.subject}") as connection:
            found = await administrators.sign_in(
                connection, issuer, person.subject, email=person.email, name=person.name, claimed=person.role
            )
    except (ProviderError, ValueError) as error:
        return _refused(site, attempt.page, error)
    site.provider_throttle.succeeded(address)
    cookies = [
        _cookie(request, site.sessions.issue(str(found)), LIFETIME_SECONDS, secure=_public_https(provider)),
        _cookie(request, "", 0, ATTEMPT_COOKIE),
    ]
    return Redirect(attempt.page, status_code=303, cookies=cookies)


@post("/sign-out")
async def sign_out(request: AnyRequest) -> Redirect:
    """Take the cookie back."""
    _refuse_other_sites(request)
    return Redirect(SIGN_IN, status_code=303, cookies=[_cookie(request, "", 0)])


def _form(
    site: Site, page: str, error: str | None = None, status: int = 200, headers: dict[str, str] | None = None
) -> Response[str]:
    issuer = None if site.provider is None else urlsplit(site.provider.settings.issuer).netloc
    return site.page("sign_in.html", status, headers, next=page, error=error, issuer=issuer)


def _too_many(site: Site, page: str, wait: float) -> Response[str]:
    message = f"Too many failed attempts from your address. Try again in {math.ceil(wait / 60)} min."
    return _form(site, page, message, 429, {"retry-after": str(math.ceil(wait))})


def _provider(site: Site) -> Provider:
    if site.provider is None:
        raise NotFoundException("No OIDC provider is configured: sign in with the admin key.")
    return site.provider


def _refused(site: Site, page: str, error: Exception) -> Response[str]:
    log.warning("sign_in_refused", reason=str(error))
    if isinstance(error, ProviderError):
        status = 403 if isinstance(error, AnswerError) else 502
        return _form(site, page, f"Signing in with the provider failed: {error}.", status)
    return _form(site, page, str(error), 403)


def _packed(attempt: Attempt) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(attempt)).decode()


def _public_https(provider: Provider) -> bool:
    """Whether browsers came over HTTPS, be it that a proxy before us ended it."""
    return provider.settings.redirect_uri.startswith("https://")


def _cookie(request: AnyRequest, value: str, seconds: int, name: str = COOKIE, *, secure: bool = False) -> Cookie:
    """SameSite=Lax: a link to an operation from a chat works, a form on another site does not.

    For every path, since the admin API takes the session too.
    """
    secure = secure or request.url.scheme == "https"
    return Cookie(name, path="/", value=value, max_age=seconds, secure=secure, httponly=True, samesite="lax")


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
