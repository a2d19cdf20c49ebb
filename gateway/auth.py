"""Virtual keys: who is calling, told by the key alone."""

import time
from datetime import UTC, datetime

from sqlalchemy.ext.asyncio import AsyncEngine

from billing.people import KEY_PREFIX, Principal, find_key, key_hash
from gateway.database import reachable
from gateway.errors import ApiError

CACHE_SECONDS = 1.0
"""How long a look-up is remembered, so the longest that a revoked key still works."""
CACHE_ENTRIES = 10_000
MAX_KEY_CHARACTERS = 200


class Keys:
    """Looks keys up by SHA-256, in a cache that forgets within CACHE_SECONDS, else in the database.

    Hashing first makes the comparison constant-time in the secret: what an attacker could time is the hash.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._cache: dict[bytes, tuple[float, Principal | None]] = {}

    async def authenticate(self, authorization: str | None) -> Principal:
        """Raises ApiError 401 (no, wrong, revoked or expired key) or 503 (the database is away)."""
        principal = await self._find(_bearer(authorization))
        if principal is None:
            raise _refusal("Incorrect API key provided. Check the key, or ask your operator for a new one.")
        if principal.revoked_at is not None:
            raise _refusal("This API key has been revoked. Ask your operator for a new one.")
        if principal.expires_at is not None and principal.expires_at <= datetime.now(UTC):
            raise _refusal(f"This API key expired at {principal.expires_at:%Y-%m-%d %H:%M} UTC. Ask for a new one.")
        return principal

    async def _find(self, secret: str) -> Principal | None:
        digest = key_hash(secret)
        now = time.monotonic()
        found = self._cache.get(digest)
        if found is not None and now - found[0] < CACHE_SECONDS:
            return found[1]
        async with reachable(), self._engine.connect() as connection:
            principal = await find_key(connection, secret)
        if len(self._cache) >= CACHE_ENTRIES:
            self._cache.clear()
        self._cache[digest] = (now, principal)
        return principal


def _bearer(authorization: str | None) -> str:
    if not authorization:
        raise _refusal("You did not provide an API key. Send it as `Authorization: Bearer fk-…`.")
    scheme, _, secret = authorization.partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise _refusal("The Authorization header must read `Bearer fk-…`.")
    if not secret.startswith(KEY_PREFIX) or len(secret) > MAX_KEY_CHARACTERS:
        raise _refusal(f"Incorrect API key provided: Farthing's keys start with `{KEY_PREFIX}`.")
    return secret


def _refusal(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})
