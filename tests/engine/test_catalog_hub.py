"""Hub models, fetched by the real client from a small server that speaks the hub's protocol."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine import catalog
from engine.catalog import CatalogError

REVISION = "a" * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": 1}',
    "model.safetensors": bytes(range(256)) * 2000,
    "pytorch_model.bin": b"not wanted: the same weights again, as a pickle",
}


class Hub(BaseHTTPRequestHandler):
    """The three answers that a download needs: a repository's tree, a file's head, a file."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.startswith(f"/api/models/org/tiny/tree/{REVISION}"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self.answer(200, json.dumps(tree).encode())
        else:
            self.file(body=True)

    def do_HEAD(self) -> None:
        self.file(body=False)

    def file(self, *, body: bool) -> None:
        data = FILES.get(self.path.removeprefix(f"/org/tiny/resolve/{REVISION}/"))
        if data is None:
            self.answer(404, b'{"error": "not found"}', code="RevisionNotFound")
        else:
            self.answer(200, data, body=body)

    def answer(self, status: int, data: bytes, *, body: bool = True, code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A running hub, and a catalogue whose models `tiny` and `gone` are on it or should be."""
    tables = [
        f"""
        [{name}]
        architecture = "Llama"
        parameters = "1"
        licence = "MIT"
        size = 600_000
        hub = {{ repository = "org/tiny", revision = "{revision}" }}
        """
        for name, revision in (("tiny", REVISION), ("gone", "b" * 40))
    ]
    (tmp_path / "catalog.toml").write_text("".join(tables))
    monkeypatch.setattr(catalog, "CATALOG_FILE", tmp_path / "catalog.toml")
    monkeypatch.setenv("FARTHING_MODELS", str(tmp_path / "models"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    yield
    server.shutdown()
    server.server_close()


def pull(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`models pull` in a process of its own, for the hub's client reads its settings when it is imported."""
    program = (
        "import sys; from pathlib import Path; from engine import catalog; from engine.models_cli import app; "
        "catalog.CATALOG_FILE = Path(sys.argv[1]); app(['pull', sys.argv[2]])"
    )
    command = [sys.executable, "-c", program, str(catalog.CATALOG_FILE), name]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_hub_model_is_fetched_checked_and_removed(hub: None) -> None:
    done = pull("tiny")
    folder = catalog.models_folder() / "tiny"
    assert done.returncode == 0 and f"tiny is ready: {folder}" in done.stdout, done.stderr
    assert {path.name for path in folder.iterdir()} == {*FILES, "SHA256SUMS"} - {"pytorch_model.bin"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert catalog.resolve("tiny") == folder
    catalog.verify("tiny")
    (folder / "model.safetensors").write_bytes(b"x" + FILES["model.safetensors"][1:])
    with pytest.raises(CatalogError, match=r"damaged \(model\.safetensors\)"):
        catalog.verify("tiny")
    assert catalog.remove("tiny") and not folder.exists() and not catalog.find("tiny").present


@pytest.mark.parametrize(("name", "offline"), [("gone", "0"), ("tiny", "1")])
def test_a_hub_that_cannot_serve_the_model_is_explained(hub: None, name: str, offline: str) -> None:
    failed = pull(name, HF_HUB_OFFLINE=offline)
    assert failed.returncode == 1
    assert "Error: org/tiny could not be fetched from the Hugging Face hub" in failed.stderr
    assert "HF_ENDPOINT" in failed.stderr and "Traceback" not in failed.stderr
    assert not catalog.find(name).present
