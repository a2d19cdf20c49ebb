"""Signing in through an OpenID Connect provider: authorisation code with PKCE, state and nonce.

OpenID Connect Core 1.0, RFC 7636, RFC 9207. What the provider says is believed only with its signature, for us, now,
and for this sign-in.
"""

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

import httpx
import msgspec
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from billing.administrators import lower_address
from billing.roles import Role, higher

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "Ed25519", "EdDSA")
"""Signatures with a private key. `none`, and HMAC with what everybody may know, are none."""
SKEW_SECONDS = 60
KEPT_SECONDS = 3600.0
"""How long the provider's description and keys are taken as they were."""
REFETCH_SECONDS = 30.0
"""Keys that it did not have are looked for anew, no more often than this."""
LONGEST_SUBJECT = 255
"""In characters: OpenID Connect allows no more."""
_HTTP_SECONDS = 10.0
_SCOPE = "openid email profile"


class ProviderError(Exception):
    """The provider is away, or what came from it is not to be believed; the message says which, without secrets."""


class AnswerError(ProviderError):
    """What the browser brought back is no sign-in: another one's, or the provider's no. Nothing is wrong with it."""


class ProviderSettings(msgspec.Struct, frozen=True, kw_only=True):
    issuer: str
    client_id: str
    client_secret: str | None
    """None: a public client; PKCE alone protects the code."""
    redirect_uri: str
    allowed_domains: frozenset[str] = frozenset()
    """Of e-mail addresses, in lower case; empty: any."""
    role_claim: str | None = None
    roles: Mapping[str, Role] = {}
    """What a value of `role_claim` makes of its bearer."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One sign-in under way; a signed cookie carries it to the provider and back."""

    state: str
    nonce: str
    verifier: str
    page: str
    """Where to go on afterwards."""


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """Whom the provider vouches for."""

    subject: str
    email: str | None
    """None unless the provider has verified it."""
    name: str
    role: Role | None
    """What the role claim makes of them."""


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None = None
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


class Provider:
    """One OIDC provider, as seen by one process."""

    def __init__(self, settings: ProviderSettings, clock: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self._clock = clock
        self._http = httpx.AsyncClient(timeout=_HTTP_SECONDS)
        self._description: tuple[float, _Description] | None = None
        self._keys: tuple[float, KeySet] | None = None

    def new_attempt(self, page: str) -> Attempt:
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        return Attempt(state=state, nonce=nonce, verifier=verifier, page=page)

    async def authorization_url(self, attempt: Attempt) -> str:
        """Where the browser goes. Raises ProviderError."""
        endpoint = (await self._described()).authorization_endpoint
        digest = hashlib.sha256(attempt.verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self.settings.client_id,
            "redirect_uri": self.settings.redirect_uri,
            "scope": _SCOPE,
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    async def finish(self, attempt: Attempt, answer: Mapping[str, str]) -> Person:
        """Who came back with `answer` (the callback's query). Raises ProviderError, be it an AnswerError."""
        if not hmac.compare_digest(answer.get("state", "").encode(), attempt.state.encode()):
            raise AnswerError("the answer belongs to another sign-in")
        if answer.get("iss", self.settings.issuer) != self.settings.issuer:
            raise AnswerError("the answer comes from another provider")
        if "error" in answer:
            raise AnswerError(f"the provider refused: {answer['error'][:100]!r}")
        if not answer.get("code"):
            raise AnswerError("the answer has no code")
        tokens = await self._redeem(answer["code"], attempt.verifier)
        claims = await self._verified(tokens.get("id_token"), attempt.nonce)
        if "email" not in claims:
            claims.pop("email_verified", None)  # it is about an address that we were not told
            claims |= await self._more_claims(claims["sub"], tokens.get("access_token"))
        return self._person(claims)

    async def _redeem(self, code: str, verifier: str) -> dict[str, Any]:
        described = await self._described()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.settings.redirect_uri,
            "code_verifier": verifier,
        }
        secret = self.settings.client_secret
        basic: httpx.BasicAuth | None = None
        if secret is not None and "client_secret_basic" in described.token_endpoint_auth_methods_supported:
            basic = httpx.BasicAuth(*(_form_encoded(each) for each in (self.settings.client_id, secret)))
        else:
            form |= {"client_id": self.settings.client_id} | ({} if secret is None else {"client_secret": secret})
        try:
            answer = await self._http.send(
                self._http.build_request("POST", described.token_endpoint, data=form), auth=basic
            )
        except httpx.HTTPError as error:
            raise ProviderError(f"its token endpoint does not answer ({type(error).__name__})") from error
        if answer.status_code != 200:
            raise ProviderError(f"its token endpoint answered {answer.status_code}; it did not take the code")
        return _object(answer)

    async def _verified(self, id_token: object, nonce: str) -> dict[str, Any]:
        """The claims of an id token that is genuine (OpenID Connect Core 1.0, section 3.1.3.7)."""
        if not isinstance(id_token, str):
            raise ProviderError("it sent no id token")
        try:
            claims = (await self._decoded(id_token)).claims
            registry = jwt.JWTClaimsRegistry(
                now=int(self._clock()),
                leeway=SKEW_SECONDS,
                iss={"essential": True, "value": self.settings.issuer},
                aud={"essential": True, "value": self.settings.client_id},
                exp={"essential": True},
                iat={"essential": True},
                sub={"essential": True},
                nonce={"essential": True, "value": nonce},
            )
            registry.validate(claims)
        except (JoseError, ValueError, TypeError) as error:
            raise ProviderError(f"its id token is not to be believed: {type(error).__name__}: {error}") from error
        several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if (several or "azp" in claims) and claims.get("azp") != self.settings.client_id:
            raise ProviderError("its id token was not issued to us")
        subject = claims["sub"]
        if not isinstance(subject, str) or not 0 < len(subject) <= LONGEST_SUBJECT or not subject.isprintable():
            raise ProviderError("its id token names nobody")
        return claims

    async def _decoded(self, id_token: str) -> jwt.Token:
        keys = await self._key_set()
        try:
            return jwt.decode(id_token, keys, algorithms=list(ALGORITHMS))
        except (JoseError, ValueError):
            # The provider may have new keys. Ask, but not for every forgery.
            if self._keys is not None and self._clock() - self._keys[0] < REFETCH_SECONDS:
                raise
            self._keys = None
            return jwt.decode(id_token, await self._key_set(), algorithms=list(ALGORITHMS))

    async def _more_claims(self, subject: str, access_token: object) -> dict[str, Any]:
        """What only the userinfo endpoint tells, where there is one."""
        endpoint = (await self._described()).userinfo_endpoint
        if endpoint is None or not isinstance(access_token, str):
            return {}
        claims = await self._get(endpoint, {"authorization": f"Bearer {access_token}"})
        if claims.get("sub") != subject:
            raise ProviderError("its userinfo endpoint spoke of somebody else")
        return claims

    def _person(self, claims: dict[str, Any]) -> Person:
        verified = claims.get("email_verified") in (True, "true")
        email = claims.get("email") if verified else None
        email = lower_address(email) if isinstance(email, str) and email.isprintable() else None
        domains = self.settings.allowed_domains
        if domains and (email is None or email.rpartition("@")[2] not in domains):
            raise ProviderError("this address is not of a domain that may sign in here")
        values = claims.get(self.settings.role_claim) if self.settings.role_claim else None
        named = values if isinstance(values, list) else [values]
        roles = [self.settings.roles[each] for each in named if isinstance(each, str) and each in self.settings.roles]
        called = "".join(filter(str.isprintable, str(claims.get("name") or "")))[:200].strip()
        name = called or email or claims["sub"]
        return Person(subject=claims["sub"], email=email, name=name, role=higher(roles) if roles else None)

    async def _described(self) -> _Description:
        if self._description is None or self._clock() - self._description[0] > KEPT_SECONDS:
            place = f"{self.settings.issuer.rstrip('/')}/.well-known/openid-configuration"
            try:
                found = msgspec.convert(await self._get(place), _Description)
            except msgspec.ValidationError as error:
                raise ProviderError(f"its description at {place} lacks something: {error}") from error
            if found.issuer != self.settings.issuer:
                raise ProviderError(f"it calls itself {found.issuer!r}; give that as the issuer if it is right")
            self._description = (self._clock(), found)
        return self._description[1]

    async def _key_set(self) -> KeySet:
        if self._keys is None or self._clock() - self._keys[0] > KEPT_SECONDS:
            found = await self._get((await self._described()).jwks_uri)
            keys = found.get("keys")
            usable = [key for key in keys if _signs(key)] if isinstance(keys, list) else []
            try:
                self._keys = (self._clock(), KeySet.import_key_set({"keys": usable}))
            except (JoseError, ValueError, TypeError, KeyError) as error:
                raise ProviderError("its keys cannot be read") from error
        return self._keys[1]

    async def _get(self, url: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
        try:
            answer = await self._http.get(url, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProviderError(f"{url} does not answer ({type(error).__name__})") from error
        if answer.status_code != 200:
            raise ProviderError(f"{url} answered {answer.status_code}")
        return _object(answer)

    async def close(self) -> None:
        await self._http.aclose()


def _signs(key: object) -> bool:
    return isinstance(key, dict) and key.get("use", "sig") == "sig" and key.get("kty") in ("RSA", "EC", "OKP")


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ProviderError(f"{answer.url.copy_with(query=None)} did not answer with a JSON object")
    return found


def _form_encoded(text: str) -> str:
    """As RFC 6749, section 2.3.1 wants what goes into HTTP Basic."""
    return urlencode({"": text})[1:]
