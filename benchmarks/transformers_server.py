"""Hugging Face transformers `generate` behind /v1/completions: what arrives together runs as one padded batch.

Run as `python -m benchmarks.transformers_server FOLDER PORT`. A batch is static, as `generate` has it: up to 32
requests with one token count, padded on the left, and who arrives while it runs waits for its end. A request that asks
for a stream runs alone (`generate` streams no batches).
"""

import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

BATCH = 32
GATHER_SECONDS = 0.02
"""How long a batch waits for another member."""


@dataclass
class Job:
    prompt: list[int]
    tokens: int
    stream: bool
    pieces: "queue.Queue[list[int] | None]" = field(default_factory=queue.Queue)
    """Generated ids as they come; None at the end."""


class Pieces(BaseStreamer):
    """Hands generated ids over one by one. The first call brings the prompt."""

    def __init__(self, job: Job) -> None:
        self._job, self._prompt_seen = job, False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._job.pieces.put(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        self._job.pieces.put(None)


class Service:
    """The model and the requests that wait for it."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._model.train(False)
        self.waiting: queue.Queue[Job] = queue.Queue()
        self._held: Job | None = None

    def run(self) -> None:
        while True:
            batch = self._gather()
            if batch[0].stream:
                self._generate(batch, Pieces(batch[0]))
                continue
            rows = self._generate(batch, None)
            for job, row in zip(batch, rows, strict=True):
                job.pieces.put(row)
                job.pieces.put(None)

    def _gather(self) -> list[Job]:
        first, self._held = self._held or self.waiting.get(), None
        batch = [first]
        while not first.stream and len(batch) < BATCH:
            try:
                job = self.waiting.get(timeout=GATHER_SECONDS)
            except queue.Empty:
                break
            if job.stream or job.tokens != first.tokens:
                self._held = job
                break
            batch.append(job)
        return batch

    def _generate(self, batch: list[Job], streamer: Pieces | None) -> list[list[int]]:
        longest, tokens = max(len(job.prompt) for job in batch), batch[0].tokens
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, longest - len(job.prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=streamer,
            )
        rows: list[list[int]] = out[:, longest:].tolist()
        return rows


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Service

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send("application/json", b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        job = Job(body["prompt"], body["max_tokens"], bool(body.get("stream")))
        self.service.waiting.put(job)
        usage = {"prompt_tokens": len(job.prompt), "completion_tokens": job.tokens}
        if job.stream:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for ids in _pieces(job):
                self._event({"choices": [{"text": self.service.tokenizer.decode(ids)}]})
            self._event({"choices": [], "usage": usage})
            self.close_connection = True
            return
        ids = [token for piece in _pieces(job) for token in piece]
        reply = {"choices": [{"text": self.service.tokenizer.decode(ids)}], "usage": usage}
        self._send("application/json", json.dumps(reply).encode())

    def _event(self, frame: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(frame).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _pieces(job: Job) -> Iterator[list[int]]:
    while (piece := job.pieces.get()) is not None:
        yield piece


class Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True


def main(folder: str, port: int) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    Handler.service = Service(folder)
    threading.Thread(target=Server(("127.0.0.1", port), Handler).serve_forever, daemon=True).start()
    Handler.service.run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
