"""The upstream that gateways are measured in front of: `python -m benchmarks.gateway_upstream PORT`.

It answers a chat completion at once, whole or as a stream of 20 chunks, a finish, a usage and [DONE], so that what is
measured is the gateway. A streamed request whose body has the words `hold the line` gets one chunk, and the rest once
somebody posts to /release.
"""

import asyncio
import json
import sys
from typing import Any, cast

import httptools
import uvloop

CHUNKS = 20
HOLD = b"hold the line"
TEXT = "A farthing was a quarter of a penny, and the last ones were struck in 1956."


def whole(status: str, value: Any) -> bytes:
    body = json.dumps(value).encode()
    return f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def piece(data: bytes) -> bytes:
    """One server-sent event as one piece of a chunked body."""
    event = b"data: %s\n\n" % data
    return b"%x\r\n%s\r\n" % (len(event), event)


def chunk(choices: list[Any], **more: Any) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "fake"}
    return piece(json.dumps(head | {"choices": choices} | more, separators=(",", ":")).encode())


def delta(text: str | None, finish: str | None = None) -> dict[str, Any]:
    said = {} if text is None else {"content": text}
    return {"index": 0, "delta": said, "logprobs": None, "finish_reason": finish}


def usage(completion: int) -> dict[str, int]:
    return {"prompt_tokens": 60, "completion_tokens": completion, "total_tokens": 60 + completion}


MESSAGE = {"role": "assistant", "content": TEXT}
REPLY = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1_700_000_000, "model": "fake"}
REPLY |= {"choices": [{"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": "stop"}], "usage": usage(18)}
WHOLE = whole("200 OK", REPLY)
MODELS = whole("200 OK", {"object": "list", "data": [{"id": "fake", "object": "model", "owned_by": "benchmark"}]})
OK = whole("200 OK", {"status": "ok"})
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECES = [chunk([delta(f" word{number}")]) for number in range(CHUNKS)]
LAST = [chunk([delta(None, "stop")]), chunk([], usage=usage(CHUNKS)), piece(b"[DONE]"), b"0\r\n\r\n"]

held: set["Answering"] = set()


class Answering(asyncio.Protocol):
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own is none by its class
        self.parser = httptools.HttpRequestParser(self)
        self.path, self.body = b"", b""

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        held.discard(self)

    def on_message_begin(self) -> None:
        self.path, self.body = b"", b""

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.path.endswith(b"/chat/completions"):
            self.complete()
        elif self.path.endswith(b"/release"):
            for waiting in list(held):
                waiting.finish()
            self.transport.write(OK)
        else:
            self.transport.write(MODELS if self.path.endswith(b"/models") else OK)

    def complete(self) -> None:
        if b'"stream":true' not in self.body and b'"stream": true' not in self.body:
            self.transport.write(WHOLE)
            return
        self.transport.write(HEAD + PIECES[0])
        if HOLD in self.body:
            held.add(self)
        else:
            self.finish()

    def finish(self) -> None:
        held.discard(self)
        for one in (*PIECES[1:], *LAST):  # a write each, as a model's tokens come
            self.transport.write(one)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
