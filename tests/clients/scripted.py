"""An upstream for what no model can be made to do: it says what a test counts on, in OpenAI's shapes.

Chat completions call two functions at once, their fragments interleaved where they are streamed. Embeddings have 768
numbers, 0/768 to 767/768, as base64 where that is asked for.
"""

import base64
import contextlib
import json
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WIDTH = 768
USAGE = {"prompt_tokens": 12, "completion_tokens": 20, "total_tokens": 32}
CALLS = [("call_a", "weather", '{"city": "Paris"}'), ("call_b", "weather", '{"city": "Oslo"}')]


def vector() -> list[float]:
    return [number / WIDTH for number in range(WIDTH)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._json({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path.endswith("/embeddings"):
            self._json(self._embeddings(body))
        elif body.get("stream"):
            self._stream()
        else:
            calls = [_call(*call) for call in CALLS]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            self._json(_object("chat.completion") | {"choices": [choice], "usage": USAGE})

    def _embeddings(self, body: dict[str, Any]) -> dict[str, Any]:
        found: Any = vector()
        if body.get("encoding_format") == "base64":
            found = base64.b64encode(struct.pack(f"<{WIDTH}f", *found)).decode()
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [{"object": "embedding", "index": index, "embedding": found} for index in range(len(texts))]
        usage = {"prompt_tokens": 4, "total_tokens": 4}
        return {"object": "list", "data": data, "model": "scripted", "usage": usage}

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        starts = [{"tool_calls": [{"index": number, **_call(*call[:2], "")}]} for number, call in enumerate(CALLS)]
        parts = [
            {"tool_calls": [{"index": number, "function": {"arguments": CALLS[number][2][at : at + 5]}}]}
            for at in range(0, 20, 5)
            for number in range(len(CALLS))
        ]
        for delta in ({"role": "assistant", "content": None}, *starts, *parts):
            self._chunk([{"index": 0, "delta": delta, "finish_reason": None}])
        self._chunk([{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])
        self._chunk([], usage=USAGE)
        self._write(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, choices: list[Any], **more: Any) -> None:
        chunk = _object("chat.completion.chunk") | {"choices": choices} | more
        self._write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _object(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "scripted"}


def _call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


@contextlib.contextmanager
def scripted_upstream() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
