"""What the headers of an answer tell of how it came about."""

from gateway.operation import Operation
from gateway.rate_headers import rate_headers

MOST_DROPPED = 20
"""More names of what was left out are not told: some clients take no long headers."""


def reply_headers(operation: Operation) -> dict[str, str]:
    """The trace id, also as the vendors' SDKs look for it; how the request was routed, what was left out of it, and
    OpenAI's words for what limits leave."""
    trace_id = operation.trace_id
    headers = {"x-farthing-trace-id": trace_id, "x-request-id": trace_id, "request-id": trace_id}
    if operation.model is not None:
        headers["x-farthing-model"] = operation.model
        headers["x-farthing-route"] = operation.route
    if operation.dropped:
        headers["x-farthing-dropped-params"] = ", ".join(operation.dropped[:MOST_DROPPED])
    if operation.hold is not None:
        if operation.hold.requests is not None:
            headers |= rate_headers("requests", operation.hold.requests)
        if operation.hold.tokens is not None:
            headers |= rate_headers("tokens", operation.hold.tokens)
    return headers
