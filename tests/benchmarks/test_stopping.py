"""A peer that needs many times as long as Farthing did is stopped in that workload; the rest of it is measured."""

import sys
from pathlib import Path

import pytest

from benchmarks import engine
from benchmarks.engine import Run
from benchmarks.servers import System
from benchmarks.workloads import QUICK
from tests.engine.fake_model import fake_tokenizer

NEVER_STREAMS = """
import http.server, json, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"{}")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked.get("stream"):
            time.sleep(600)
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        self.answer(json.dumps({"choices": [{"text": ""}], "usage": usage}).encode())
    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_workload_that_takes_too_long_is_stopped_once_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LEAST_PATIENCE", 1.0)
    script = tmp_path / "peer.py"
    script.write_text(NEVER_STREAMS)
    peer = System("peer", "llama.cpp", [sys.executable, str(script), "{port}"], "any")
    run = Run(fake_tokenizer(), QUICK, ["decode", "rag"], repeats=2, longest={"decode": 0.1, "rag": 10})
    run.all([peer])
    assert run.stopped == {("peer", "decode"): 1.0} and not run.failed
    report = run.report([peer])
    assert [row.runs for row in report.rows if row.metric == "total"] == [2]
    assert any("peer was stopped in decode after 1 s; Farthing's slowest took 0.1 s" in note for note in report.notes)
