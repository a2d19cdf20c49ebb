"""A query's parameters: each is read, or refused. A filter with a typing error would else quietly show too much."""

from litestar import Litestar
from litestar.handlers import BaseRouteHandler
from litestar.routes import HTTPRoute

from gateway.admin.access import Connection
from gateway.errors import ApiError

_READ, _REPEATED = "query", "repeated_query"


def note_parameters(app: Litestar) -> None:
    """Write down beside each route of `app` which parameters it and its dependencies read."""
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            for handler, model in route.route_handler_map.values():
                handler.opt[_READ] = frozenset(each.field_alias for each in model.expected_query_params)
                handler.opt[_REPEATED] = frozenset(model.sequence_query_parameter_names)


def refuse_unread(connection: Connection, handler: BaseRouteHandler) -> None:
    """Raises ApiError 400 for a parameter that the route does not read, or reads once and was given more than once."""
    given = [name for name, _ in connection.query_params.multi_items()]
    for name in dict.fromkeys(given):
        if name not in handler.opt[_READ]:
            known = ", ".join(sorted(handler.opt[_READ])) or "none"
            text = f"There is no query parameter {name[:100]!r} here; there are: {known}."
            raise ApiError(400, "unknown_parameter", text, param=name[:100])
        if name not in handler.opt[_REPEATED] and given.count(name) > 1:
            raise ApiError(400, "repeated_parameter", f"Give {name!r} once.", param=name)
