"""Large pieces of an answer on their way to the caller."""

from typing import Any

from gateway.caller_request import JOINED_BYTES, CallerRequest

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Line:
    """A connection that takes everything at once, and keeps what it was given."""

    is_full = False

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    async def writable(self) -> None:
        raise AssertionError("it is never full")

    def resume_reading(self) -> None: ...

    def answered(self, request: CallerRequest) -> None: ...

    def close(self) -> None: ...


async def test_a_large_chunk_is_sent_as_it_is_so_that_many_callers_share_it() -> None:
    """A stream out of the response cache is one piece of up to some MB, and some of its callers read slowly."""
    large, small, sent = b"x" * (JOINED_BYTES + 1), b"y", Line()
    scope: dict[str, Any] = {"path": "/", "method": "POST"}
    request = CallerRequest(sent, scope, keep_alive=True, old=False, expects=False)
    await request.send({"type": "http.response.start", "status": 200, "headers": []})
    for body, more in ((large, True), (small, True), (large, False)):
        await request.send({"type": "http.response.body", "body": body, "more_body": more})
    chunk = b"%x\r\n%b\r\n" % (len(large), large)
    assert b"".join(sent.written) == HEAD + chunk + b"1\r\ny\r\n" + chunk + b"0\r\n\r\n"
    assert sum(piece is large for piece in sent.written) == 2
