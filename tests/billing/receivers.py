"""Receivers of alerts on real sockets: HTTP, and SMTP with TLS and a login."""

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from aiohttp import web
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

Answer = Callable[[web.Request], Any]


@dataclass
class Got:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """What came; what it answers may be changed at any time."""

    url: str = ""
    got: list[Got] = field(default_factory=list)
    answer: Answer = lambda _: web.json_response({})


@contextlib.asynccontextmanager
async def http_receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()

    async def take(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        receiver.got.append(Got(request.path_qs, headers, body))
        answer = receiver.answer(request)
        found: web.StreamResponse = await answer if asyncio.iscoroutine(answer) else answer
        return found

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield receiver
    finally:
        await runner.cleanup()


def certificate(folder: Path) -> Path:
    """A file with a certificate for 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM) + secret)
    return path


@dataclass
class Mailbox:
    port: int = 0
    mails: list[EmailMessage] = field(default_factory=list)
    to: list[list[str]] = field(default_factory=list)
    logins: list[bytes] = field(default_factory=list)
    refuse: tuple[str, ...] = ()
    """Recipients that it does not know."""

    async def handle_RCPT(self, server: SMTP, session: Any, envelope: Envelope, address: str, options: Any) -> str:  # noqa: N802
        if address in self.refuse:
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Envelope) -> str:  # noqa: N802
        assert isinstance(envelope.content, bytes)
        mail = message_from_bytes(envelope.content, policy=policy.default)
        assert isinstance(mail, EmailMessage)
        self.mails.append(mail)
        self.to.append([str(each) for each in envelope.rcpt_tos])
        return "250 OK"

    def log_in(self, server: SMTP, session: Any, envelope: Envelope, mechanism: str, data: LoginPassword) -> AuthResult:
        self.logins.append(data.login)
        return AuthResult(success=(data.login, data.password) == (b"farthing@x", b"p@ss:word"))


@contextlib.asynccontextmanager
async def smtp_receiver(pem: Path | None, from_the_start: bool = False) -> AsyncIterator[Mailbox]:
    """`pem`: its certificate; with one it wants TLS and a login, by STARTTLS or `from_the_start`."""
    mailbox = Mailbox()
    context = None
    if pem is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pem)

    def factory() -> SMTP:
        return SMTP(
            mailbox,
            authenticator=mailbox.log_in,
            auth_required=pem is not None,
            auth_require_tls=not from_the_start,
            require_starttls=pem is not None and not from_the_start,
            tls_context=None if from_the_start else context,
        )

    loop = asyncio.get_running_loop()
    server = await loop.create_server(factory, "127.0.0.1", 0, ssl=context if from_the_start else None)
    mailbox.port = server.sockets[0].getsockname()[1]
    try:
        yield mailbox
    finally:
        server.close()
