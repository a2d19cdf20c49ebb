"""What the headers of an answer tell of how it came about."""

from gateway.operation import Operation

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
        for name, rate in (("requests", operation.hold.requests), ("tokens", operation.hold.tokens)):
            if rate is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(rate.limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(rate.remaining, 0))
                headers[f"x-ratelimit-reset-{name}"] = f"{rate.reset_seconds:.3f}s"
    return headers
