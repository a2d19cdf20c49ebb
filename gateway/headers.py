"""HTTP headers as a mapping."""

from collections.abc import Collection


def read_headers(pairs: Collection[tuple[bytes, bytes]]) -> dict[str, str]:
    """By their names, which are in lower case already.

    What comes more than once is one list (RFC 9110, 5.3): each proxy may add its own X-Forwarded-For, and of two
    credentials neither counts.
    """
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
    if len(headers) < len(pairs):
        values: dict[str, list[str]] = {}
        for name, value in pairs:
            values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        headers = {name: ", ".join(several) for name, several in values.items()}
    return headers
