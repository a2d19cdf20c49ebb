"""Puts the admin API together: routes behind the gate, one shape of errors, and the description of itself.

An application of its own inside the gateway's, so that neither's errors or descriptions reach into the other.
"""

import hmac
from typing import Annotated

from litestar import Litestar, Response, Router, asgi
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.handlers import ASGIRouteHandler, BaseRouteHandler, HTTPRouteHandler
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme, Server
from litestar.params import HeaderParameter
from litestar.types import Receive, Scope, Send
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.people import MissingError, TakenError
from engine.protocol import ErrorBody
from gateway.admin import (
    administrators,
    alerts,
    audit,
    budgets,
    exports,
    invoices,
    keys,
    leases,
    orgs,
    prices,
    reconciliation,
    teams,
    usage,
    users,
    wallets,
)
from gateway.admin.access import Connection, Gate
from gateway.admin.paging import page
from gateway.admin.queries import note_parameters, refuse_unread
from gateway.admin.writing import MOST_CHARACTERS, Admin, AnyRequest, Writer
from gateway.api.callers import failure, refusal
from gateway.errors import ApiError

PATH = "/admin/v1"
ROUTES: list[HTTPRouteHandler] = [
    *orgs.ROUTES,
    *teams.ROUTES,
    *users.ROUTES,
    *keys.ROUTES,
    *budgets.ROUTES,
    *wallets.ROUTES,
    *prices.ROUTES,
    *usage.ROUTES,
    *exports.ROUTES,
    *invoices.ROUTES,
    *reconciliation.ROUTES,
    *leases.ROUTES,
    *alerts.ROUTES,
    *administrators.ROUTES,
    *audit.ROUTES,
]
ABOUT = """\
Administers a Farthing gateway: people, keys, money. Amounts are strings, so that no digit is lost. Lists come in pages:
give `next_cursor` as `cursor` for the next one. Every write takes an `Idempotency-Key`: sent again within a day with
the same body it is done once and answered the same (`idempotency-replayed: true`), with another it is refused (422).
Errors are `{"error": {"message", "type", "param", "code"}}`.
"""

IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        min_length=1,
        max_length=MOST_CHARACTERS,
        description="Any text of your own, like a random UUID: with it, a request that is sent again is done once.",
    ),
]


_ERRORS = {
    400: "What is wrong with the request",
    401: "Who are you",
    403: "Not for your role",
    404: "Not there, or not yours to see",
}
_WRITE_ERRORS = {
    409: "The name is taken, or an idempotent write's answer is lost",
    422: "The Idempotency-Key came with another request before",
}


def _responses(handler: HTTPRouteHandler) -> dict[int, ResponseSpec]:
    """Errors as they are, in place of the shape that Litestar's own would have; nothing where nothing is answered."""
    told = _ERRORS if "GET" in handler.http_methods else _ERRORS | _WRITE_ERRORS
    found = {
        status: ResponseSpec(ErrorBody, generate_examples=False, description=words) for status, words in told.items()
    }
    return found | ({204: ResponseSpec(None, description="Done")} if handler.status_code == 204 else {})


for each in ROUTES:
    each.responses = _responses(each)


def create_admin(engine: AsyncEngine, admin_key_hash: bytes, gate: Gate) -> Litestar:
    """The application to mount at PATH."""
    secret = hmac.digest(admin_key_hash, b"farthing idempotent writes, version 1", "sha256")

    def admin(request: AnyRequest) -> Admin:
        return Admin(engine, request.state.caller)

    async def guard(connection: Connection, handler: BaseRouteHandler) -> None:
        await gate.admit(connection, handler)  # Litestar copies guards, and cannot copy a gate
        refuse_unread(connection, handler)

    def writer(request: AnyRequest, idempotency_key: IdempotencyKey = None) -> Writer:
        return Writer(engine, secret, request, idempotency_key)

    app = Litestar(
        [
            Router(
                "/",
                route_handlers=ROUTES,
                guards=[guard],
                dependencies={
                    "admin": Provide(admin, sync_to_thread=False),
                    "writer": Provide(writer, sync_to_thread=False),
                    "page": Provide(page, sync_to_thread=False),
                    "filters": Provide(usage.filters, sync_to_thread=False),
                },
            )
        ],
        exception_handlers={
            ApiError: refusal,
            MissingError: _missing,
            TakenError: _taken,
            ValueError: _invalid,
            HTTPException: _http_error,
            DBAPIError: _database_error,
            Exception: failure,
        },
        openapi_config=_description(),
        logging_config=None,
        request_max_body_size=1024 * 1024,
    )
    note_parameters(app)
    return app


def mounted(application: Litestar) -> ASGIRouteHandler:
    """It, as a part of the gateway's application."""

    @asgi(PATH, is_mount=True, copy_scope=True)
    async def admin(scope: Scope, receive: Receive, send: Send) -> None:
        await application(scope, receive, send)

    return admin


def _description() -> OpenAPIConfig:
    token = SecurityScheme(type="http", scheme="bearer", description="The admin key, or a token.")
    return OpenAPIConfig(
        title="Farthing admin API",
        version="1",
        description=ABOUT,
        path="/openapi.json",
        servers=[Server(url=PATH)],
        components=Components(security_schemes={"token": token}),
        security=[{"token": []}],
        use_handler_docstrings=True,
        render_plugins=[JsonRenderPlugin(path="/")],  # the other ones fetch their pages from elsewhere,
    )


def _missing(request: AnyRequest, error: MissingError) -> Response[bytes]:
    return refusal(request, ApiError(404, "not_found", _sentence(error)))


def _taken(request: AnyRequest, error: TakenError) -> Response[bytes]:
    return refusal(request, ApiError(409, "taken", _sentence(error)))


def _invalid(request: AnyRequest, error: ValueError) -> Response[bytes]:
    """How billing refuses what makes no sense."""
    return refusal(request, ApiError(400, "invalid_value", _sentence(error)))


def _http_error(request: AnyRequest, error: HTTPException) -> Response[bytes]:
    """Litestar's own refusals: no such path, a body that does not fit."""
    reasons = getattr(error, "extra", None)
    places = [each for each in reasons if isinstance(each, dict)] if isinstance(reasons, list) else []
    detail = "; ".join(f"{each.get('key', 'body')}: {each.get('message', '')}" for each in places)
    param = str(places[0]["key"]) if places and "key" in places[0] else None
    text = f"{error.detail.partition(' for ')[0]}: {detail}" if detail else error.detail or "The request was refused."
    return refusal(request, ApiError(error.status_code, None, text, param=param, headers=error.headers))


def _database_error(request: AnyRequest, error: DBAPIError) -> Response[bytes]:
    """What PostgreSQL cannot store (a NUL in a text, a number out of range) is the caller's; all else is ours."""
    if str(getattr(error.orig, "sqlstate", "")).startswith("22"):
        text = "A value cannot be stored: texts have no NUL character, and numbers must be in range."
        return refusal(request, ApiError(400, "invalid_value", text))
    return failure(request, error)


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")
