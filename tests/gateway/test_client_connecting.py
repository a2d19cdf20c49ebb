"""How the relay's HTTP client finds and reaches an upstream: names, addresses, time, TLS."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.upstreams import client
from gateway.upstreams.connection import Origin
from gateway.upstreams.transport import UnreachableError
from tests.gateway.loops import on_both_loops
from tests.gateway.speaking import BODIES, HEAD, OK, Saying, http, post, server, whole


@contextlib.contextmanager
def hanging() -> Iterator[int]:
    """A port on 127.0.0.1 where connections are neither made nor refused: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@on_both_loops
async def test_no_connection_in_time() -> None:
    with hanging() as port:
        async with http(connect=0.3) as asking:
            began = time.monotonic()
            with pytest.raises(UnreachableError, match="no connection within"):
                await post(asking, f"http://127.0.0.1:{port}")
            assert time.monotonic() - began < 10, "it is never made"


@pytest.mark.parametrize("first", ["refuses", "hangs"])
@on_both_loops
async def test_another_address_of_the_host_is_tried(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging() as port, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        bad = free.getsockname()[1] if first == "refuses" else port
        async with server(Saying(OK)) as url, http(connect=2.0) as asking:
            good = int(url.rpartition(":")[2])

            async def addresses(_: object) -> list[Any]:
                kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
                return [(*kind, ("127.0.0.1", bad)), (*kind, ("127.0.0.1", good))]

            monkeypatch.setattr(client, "_addresses", addresses)
            assert await whole(asking, "http://model.example") == b"hi"


@on_both_loops
async def test_a_name_that_there_cannot_be() -> None:
    async with http() as asking:
        for name in ("a..b", "x" * 64, "no-such-host.invalid"):
            with pytest.raises(UnreachableError):
                await post(asking, f"http://{name}")


@on_both_loops
async def test_a_name_is_looked_up_once_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lookup takes a thread, of which there are few, until the resolver gives up: longer than we wait."""
    look_up, lookups, found = client._addresses, 0, asyncio.Event()

    async def slow(origin: Origin) -> list[Any]:
        nonlocal lookups
        lookups += 1
        await found.wait()
        return await look_up(origin)

    monkeypatch.setattr(client, "_addresses", slow)
    async with server(Saying(OK)) as url, http(connect=0.1) as hasty:
        for _ in range(2):
            for error in await asyncio.gather(*[post(hasty, url) for _ in range(20)], return_exceptions=True):
                assert isinstance(error, UnreachableError)
        asking = [asyncio.create_task(whole(hasty, url)) for _ in range(20)]
        await asyncio.sleep(0)
        found.set()
        assert await asyncio.gather(*asking) == [b"hi"] * 20
        assert lookups == 1

        async def fails(origin: Origin) -> list[Any]:
            raise OSError("no such name")

        monkeypatch.setattr(client, "_addresses", fails)
        for _ in range(2):
            with pytest.raises(UnreachableError, match="no such name"):
                await post(hasty, "http://model.example")


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://bücher.example:8080/v1", "xn--bcher-kva.example:8080"),
        ("http://bücher:8080/v1", "xn--bcher-kva:8080"),
        ("https://bücher.example/v1", "xn--bcher-kva.example"),
        ("http://[::1]:8080/v1", "[::1]:8080"),
        ("http://LOCALHOST/v1", "LOCALHOST"),
    ],
)
def test_the_host_that_is_named(url: str, host: str) -> None:
    _, lines = client._place("POST", url)
    assert f"\r\nhost: {host}\r\n" in lines


@on_both_loops
async def test_over_ipv6() -> None:
    saying = Saying(OK)
    running = await asyncio.start_server(saying, "::1", 0)
    async with http() as asking:
        assert await whole(asking, f"http://[::1]:{running.sockets[0].getsockname()[1]}") == b"hi"
    running.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and its own certificate for 127.0.0.1."""
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(file), "-out", str(file.with_suffix(".crt"))]
    subprocess.run(command, check=True, capture_output=True)
    file.write_text(file.read_text() + file.with_suffix(".crt").read_text())
    return file


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


@pytest.mark.parametrize("kind", BODIES)
@on_both_loops
async def test_over_tls(kind: str, tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(client, "_tls", lambda: known)
    saying = Saying(HEAD + BODIES[kind], then_close=kind == "until it closes")
    async with server(saying, tls) as url, http() as asking:
        for _ in range(3):
            assert await whole(asking, url) == b"hello world"
    assert saying.connections == (3 if kind == "until it closes" else 1)


@on_both_loops
async def test_a_server_that_cannot_prove_who_it_is_is_not_asked(
    tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saying = Saying(OK)
    async with server(saying, tls) as url, http() as asking:
        with pytest.raises(UnreachableError, match="certificate verify failed"):
            await post(asking, url)
    assert not saying.requests
    async with server(saying) as url, http() as asking:
        with pytest.raises(UnreachableError):
            await post(asking, url.replace("http", "https"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # an operator's own authority
    client._tls.cache_clear()
    try:
        async with server(saying, tls) as url, http() as asking:
            assert await whole(asking, url) == b"hi"
            saying.requests.clear()
            with pytest.raises(UnreachableError, match="ostname mismatch"):
                await post(asking, url.replace("127.0.0.1", "localhost"))
        assert not saying.requests
    finally:
        client._tls.cache_clear()
