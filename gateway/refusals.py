"""Answers to what cannot be read as a request: each is the last on its connection."""

MAX_HEADER_BYTES = 64 * 1024


def _answer(status: bytes, text: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (status, len(text)) + text


BAD = _answer(b"400 Bad Request", b"What came cannot be read as a request.")
LATE = _answer(b"408 Request Timeout", b"The request's headers did not come in time.")
SLOW = _answer(b"408 Request Timeout", b"The request's body did not come in time.")
LARGE = _answer(
    b"431 Request Header Fields Too Large", b"Send fewer or shorter headers: %d bytes at most." % MAX_HEADER_BYTES
)
