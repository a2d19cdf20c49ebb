"""Server-sent events as the surfaces with named events write them."""

from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()


def event(data: dict[str, Any]) -> bytes:
    """One event, by the name that its `type` says. JSON has no raw line breaks, so that one `data:` line is enough."""
    return b"event: %s\ndata: %s\n\n" % (str(data["type"]).encode(), _ENCODER.encode(data))
