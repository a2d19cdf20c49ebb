"""Puts the dashboard together: pages behind the session, the sign-in in front, one set of headers on everything."""

import structlog
from litestar import Response, Router, get
from litestar.di import Provide
from litestar.exceptions import HTTPException, NotFoundException
from litestar.params import FromPath
from sqlalchemy.ext.asyncio import AsyncEngine

from dashboards.web import assets, pages, sign_in
from dashboards.web.oidc import Provider
from dashboards.web.session import Sessions, Throttle
from dashboards.web.site import BASE, AddressOf, AnyRequest, DatabaseAwayError, Site

RETRY_SECONDS = "5"

# Everything comes from this server and no script or style stands in a page. Same-origin referrers keep the Origin
# header of our own forms, which the sign-in checks.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
NO_STORE = "no-store"

log = structlog.get_logger()


def create_router(
    engine: AsyncEngine,
    sessions: Sessions,
    throttle: Throttle,
    address_of: AddressOf,
    provider: Provider | None = None,
) -> Router:
    """The dashboard at `/dashboard`, reading through `engine`. `provider`: for signing in without the admin key."""
    site = Site(engine, sessions, throttle, address_of, provider)

    def database_away(_: AnyRequest, error: DatabaseAwayError) -> Response[str]:
        log.warning("dashboard_database_away", error=repr(error.__cause__))
        message = "PostgreSQL does not answer, so there is nothing to show. Start it again, or reload in a moment."
        return _message(site, 503, "The database is away", message, {"retry-after": RETRY_SECONDS})

    def http_error(request: AnyRequest, error: HTTPException) -> Response[str]:
        title = {404: "Not found", 403: "Refused", 413: "Too large"}.get(error.status_code, "That did not work")
        return _message(site, error.status_code, title, error.detail, error.headers)

    def failed(request: AnyRequest, _: Exception) -> Response[str]:
        log.exception("dashboard_failed", path=request.url.path)
        message = "This page could not be made. The gateway's log says why."
        return _message(site, 500, "Something is wrong here", message, None)

    private = Router(
        "/",
        route_handlers=[pages.overview, pages.usage, pages.operations, pages.operation, no_such_page],
        guards=[sign_in.session_guard(site)],
    )
    return Router(
        BASE,
        route_handlers=[
            private,
            *(sign_in.sign_in_page, sign_in.sign_in, sign_in.to_provider, sign_in.from_provider, sign_in.sign_out),
            *(assets.static, assets.plotly),
        ],
        dependencies={"site": Provide(lambda: site, sync_to_thread=False)},
        exception_handlers={
            sign_in.NotSignedInError: sign_in.to_sign_in,
            DatabaseAwayError: database_away,
            HTTPException: http_error,
            Exception: failed,
        },
        after_request=_add_headers,
        include_in_schema=False,
    )


@get("/{rest:path}", sync_to_thread=False)
def no_such_page(rest: FromPath[str]) -> Response[str]:
    """Whatever else is asked for below /dashboard."""
    raise NotFoundException("There is no such page.")


def _message(site: Site, status: int, title: str, message: str, headers: dict[str, str] | None) -> Response[str]:
    # After_request hooks do not see the answers of exception handlers.
    everything = {**HEADERS, "cache-control": NO_STORE, **(headers or {})}
    return site.page(
        "message.html",
        status,
        everything,
        title=title,
        message=message,
    )


def _add_headers(response: Response[object]) -> Response[object]:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("cache-control", NO_STORE)
    return response
