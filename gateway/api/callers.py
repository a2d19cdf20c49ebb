"""Who calls the routes that Litestar serves (files, batches), how their lists are cut into pages, and their errors."""

from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

import structlog
from litestar import Request, Response

from billing.people import Principal
from gateway.api.openai import error_body
from gateway.attribution import refuse_addresses
from gateway.auth import Keys, check_route
from gateway.client_address import client_address
from gateway.errors import ApiError
from gateway.headers import read_headers
from gateway.live import Live

log = structlog.get_logger()

AnyRequest = Request[Any, Any, Any]


async def authenticated(request: AnyRequest, live: Live, keys: Keys, api: str) -> Principal:
    """Raises ApiError as `Keys.authenticate` does, and when the key may not use `api`."""
    headers = read_headers(list(request.scope["headers"]))
    peer = (request.scope.get("client") or ("", 0))[0]
    address = client_address(peer, headers, live.settings.trusted_proxies)
    principal = await keys.authenticate(headers, address)
    check_route(principal, api)
    refuse_addresses(headers)
    return principal


class Page(NamedTuple):
    """`after`: the last item of the page before; None for the first page."""

    after: UUID | None
    limit: int
    query: dict[str, str]
    """What else was asked."""


def page_of(request: AnyRequest, most: int, usual: int, parse_id: Callable[[str], UUID | None], *others: str) -> Page:
    """Raises ApiError 400 for what is not understood."""
    query = dict(request.query_params)
    for name in query:
        if name not in ("after", "limit", *others):
            known = ", ".join(("after", "limit", *others))
            text = f"There is no query parameter `{name[:100]}` here, only {known}."
            raise bad("unknown_parameter", text, name[:100])
    after = query.pop("after", None)
    identifier = None if after is None else parse_id(after)
    if after is not None and identifier is None:
        raise bad("invalid_value", "`after` must be the id of the last item of the page before.", "after")
    limit = query.pop("limit", str(usual))
    if not limit.isascii() or not limit.isdecimal() or not 1 <= int(limit[:9]) <= most:
        raise bad("invalid_value", f"`limit` must be a number from 1 to {most}.", "limit")
    return Page(identifier, int(limit[:9]), query)


def page_body(found: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's list; `found` has one item more than `limit` when there is another page."""
    data = found[:limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": len(found) > limit}


def bad(code: str, message: str, param: str | None) -> ApiError:
    return ApiError(400, code, message, param=param)


def refusal(_: AnyRequest, error: ApiError) -> Response[bytes]:
    return Response(error_body(error), status_code=error.status, headers=error.headers, media_type="application/json")


def failure(request: AnyRequest, error: Exception) -> Response[bytes]:
    log.error("request failed", path=request.scope["path"], exc_info=error)
    text = "The gateway failed on this request; its log has the reason."
    return refusal(request, ApiError(500, "internal_error", text))
