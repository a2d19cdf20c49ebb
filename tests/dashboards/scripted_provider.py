"""An OIDC provider on a real socket that keeps the rules, until a test makes it break one.

Whoever comes is `person` at once; where there are `people`, a page asks which of them it is, as providers do.
"""

import base64
import contextlib
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

CLIENT, SECRET = "farthing", "client-secret-7d1f"
CALLBACK = "http://farthing.test/dashboard/sign-in/callback"


class ScriptedProvider:
    def __init__(self) -> None:
        self.url = ""
        self.callback = CALLBACK
        self.key: ECKey | RSAKey = ECKey.generate_key("P-256", {"kid": "one", "use": "sig"})
        self.person: dict[str, Any] = {"sub": "ada-1", "email": "Ada@Example.com", "email_verified": True}
        self.people: dict[str, dict[str, Any]] = {}
        self.userinfo: dict[str, Any] | None = None
        self.change: Callable[[dict[str, Any]], None] = lambda claims: None
        """What the id token says is changed by it before it is signed."""
        self.sign: Callable[[dict[str, Any]], str] = self.signed
        self.answer: dict[str, str] = {}
        """Takes the place of what goes back to the browser."""
        self.asked_for_keys = 0
        self.codes_brought: list[str] = []
        self._codes: dict[str, tuple[dict[str, str], dict[str, Any]]] = {}

    def signed(self, claims: dict[str, Any], key: ECKey | RSAKey | None = None) -> str:
        key = key or self.key
        return jwt.encode({"alg": "RS256" if isinstance(key, RSAKey) else "ES256", "kid": key.kid}, claims, key)

    def describe(self) -> dict[str, Any]:
        names = ("authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint")
        return {"issuer": self.url} | {name: f"{self.url}/{name}" for name in names}

    def authorize(self, query: dict[str, str], person: dict[str, Any]) -> str:
        """Where the browser goes back to, with a code."""
        assert query["response_type"] == "code" and query["client_id"] == CLIENT
        assert query["redirect_uri"] == self.callback
        assert query["code_challenge_method"] == "S256" and "openid" in query["scope"].split()
        code = secrets.token_urlsafe(16)
        self._codes[code] = query, person
        return self.back({"code": code, "state": query["state"], "iss": self.url} | self.answer)

    def back(self, answer: dict[str, str]) -> str:
        return f"{self.callback}?{urlencode(answer)}"

    def page(self) -> bytes:
        """The form that asks who it is."""
        buttons = "".join(f'<button name="who" value="{name}">I am {name}</button>' for name in self.people)
        return f'<form method="post">{buttons}<button name="who" value="">Cancel</button></form>'.encode()

    def chosen(self, query: dict[str, str], who: str) -> str:
        if who:
            return self.authorize(query, self.people[who])
        return self.back({"error": "access_denied", "state": query["state"], "iss": self.url})

    def redeem(self, form: dict[str, str], authorization: str | None) -> tuple[int, dict[str, Any]]:
        self.codes_brought.append(form["code"])
        asked, person = self._codes.pop(form["code"], (None, {}))
        expected = "Basic " + base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        if asked is None or authorization != expected or form["redirect_uri"] != self.callback:
            return 400, {"error": "invalid_grant"}
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != asked["code_challenge"]:
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        claims = person | {
            "iss": self.url,
            "aud": CLIENT,
            "iat": now,
            "exp": now + 300,
            "nonce": asked["nonce"],
        }
        self.change(claims)
        return 200, {"access_token": "access", "token_type": "Bearer", "id_token": self.sign(claims)}

    def keys(self) -> dict[str, Any]:
        self.asked_for_keys += 1
        return {"keys": [self.key.as_dict(private=False), {"kty": "unheard-of", "kid": "x"}]}


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # as many come at once


@contextlib.contextmanager
def scripted_provider(host: str = "127.0.0.1") -> Iterator[ScriptedProvider]:
    provider = ScriptedProvider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            if parts.path == "/authorization_endpoint":
                if provider.people:
                    self._send(200, "text/html", provider.page())
                else:
                    self._go(provider.authorize(query, provider.person))
            elif parts.path == "/.well-known/openid-configuration":
                self._json(200, provider.describe())
            elif parts.path == "/jwks_uri":
                self._json(200, provider.keys())
            else:
                self._json(200, provider.userinfo or {})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body, keep_blank_values=True).items()}
            parts = urlsplit(self.path)
            if parts.path == "/authorization_endpoint":
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                self._go(provider.chosen(query, form["who"]))
            else:
                self._json(*provider.redeem(form, self.headers.get("authorization")))

        def _go(self, address: str) -> None:
            self.send_response(302)
            self.send_header("location", address)
            self.end_headers()

        def _json(self, status: int, body: dict[str, Any]) -> None:
            self._send(status, "application/json", json.dumps(body).encode())

        def _send(self, status: int, media_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", media_type)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    provider.url = f"http://{host}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
