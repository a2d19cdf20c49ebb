"""Clients that send a byte now and then hold up nobody, and leave nothing behind."""

import socket

import httpx
import pytest

from tests.engine.fake_model import fake_model
from tests.engine.serving import serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"


@pytest.mark.parametrize("sent", [HEAD[:1], HEAD[:30], HEAD, HEAD + b'{"model"'])
def test_half_a_request_blocks_nobody_and_starts_nothing(sent: bytes) -> None:
    model = fake_model()
    with serving(model) as url:
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        slow = [socket.create_connection(address) for _ in range(50)]
        for client in slow:
            client.sendall(sent)
        body = {"model": "fake", "prompt": "x", "max_tokens": 4}
        for _ in range(3):
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 200
        for client in slow:
            client.close()
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 200
        assert model.finished.total() == 4 and model.blocks.held == 0
