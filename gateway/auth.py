"""Virtual keys: who is calling, told by the key alone, and what that key may be used for."""

from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncEngine

from billing.notices import Notices
from billing.people import KEY_PREFIX, Principal, key_hash
from gateway.errors import ApiError
from gateway.key_cache import KeyCache

MAX_KEY_CHARACTERS = 200
_BEARER = "Bearer "

_ENDED = {
    "revoked": "This API key has been revoked. Ask your operator for a new one.",
    "expired": "This API key expired at {principal.expires_at:%Y-%m-%d %H:%M} UTC. Ask your operator for a new one.",
    "replaced": "This API key was replaced by a newer one and ended at {principal.replaced_at:%Y-%m-%d %H:%M} UTC.",
}


class Keys:
    """Looks keys up by SHA-256.

    Hashing first makes the comparison constant-time in the secret: what an attacker could time is the hash.
    """

    def __init__(self, engine: AsyncEngine, notices: Notices) -> None:
        self._cache = KeyCache(engine, notices)

    async def authenticate(self, headers: Mapping[str, str], client_address: str) -> Principal:
        """Whom the key in `headers` (names in lower case) speaks for. Does not wait while the key is known.

        Raises ApiError 401 (no, wrong, revoked, expired or replaced key, or two different ones), 403 (not from this
        address) or 503 (the key is not known here and the database is away).
        """
        digest = key_hash(_secret(headers))
        principal = refuse_ended(self._cache.known(digest) or await self._cache.find(digest))
        if principal.networks is not None and not principal.allow_address(client_address):
            text = f"This API key may not be used from {client_address}. Ask your operator to add the address."
            raise ApiError(403, "address_not_allowed", text)
        return principal


def refuse_ended(principal: Principal | None) -> Principal:
    """The same, alive. Raises ApiError 401 where there is no such key, or it works no more."""
    if principal is None:
        raise _refusal("Incorrect API key provided. Check the key, or ask your operator for a new one.")
    if (why := principal.ended()) is not None:
        raise _refusal(_ENDED[why].format(principal=principal))
    return principal


def check_route(principal: Principal, api: str) -> None:
    """Raises ApiError 403 when the key may not use this interface (a name in `billing.restrictions.ROUTES`)."""
    if principal.routes is not None and api not in principal.routes:
        text = f"This API key may not use {api}, only {', '.join(sorted(principal.routes))}."
        raise ApiError(403, "route_not_allowed", text)


def check_model(principal: Principal, requested: str) -> None:
    """Raises ApiError 403 when the key may not ask for that name, `auto`, `small` and `large` included."""
    if principal.models is not None and requested not in principal.models:
        text = f"This API key may not use the model {requested[:100]!r}, only {', '.join(sorted(principal.models))}."
        raise ApiError(403, "model_not_allowed", text, param="model")


def _secret(headers: Mapping[str, str]) -> str:
    """The key in `Authorization: Bearer …` (OpenAI's SDKs) or `x-api-key` (Anthropic's)."""
    authorization, secret = headers.get("authorization"), headers.get("x-api-key")
    if authorization:
        bearer = authorization[len(_BEARER) :].strip() if authorization.startswith(_BEARER) else _bearer(authorization)
        if secret and secret != bearer:
            raise _refusal("`Authorization` and `x-api-key` carry different API keys. Send one of the two headers.")
        secret = bearer
    if not secret:
        raise _refusal("You did not provide an API key. Send it as `Authorization: Bearer fk-…` or `x-api-key: fk-…`.")
    if not secret.startswith(KEY_PREFIX) or len(secret) > MAX_KEY_CHARACTERS:
        raise _refusal(f"Incorrect API key provided: Farthing's keys start with `{KEY_PREFIX}`.")
    return secret


def _bearer(authorization: str) -> str:
    """The rare ways to write it: `bearer`, more spaces."""
    scheme, _, secret = authorization.partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise _refusal("The Authorization header must read `Bearer fk-…`.")
    return secret


def _refusal(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
