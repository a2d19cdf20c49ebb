"""One request's way to the database, in its caller's name; a write that is sent again is done once.

A write with an `Idempotency-Key` is remembered for a day, in the transaction that does it: equal requests at the same
time wait for the first, and get its answer. An answer may hold a key that was just made, so it is kept encrypted, with
a key that only the Idempotency-Key and the gateway's environment together give.
"""

import contextlib
import hashlib
import hmac
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from litestar import Request, Response
from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.audit import act_as
from billing.roles import Caller
from billing.tables import idempotent_write
from gateway.admin.access import refuse_other_org
from gateway.database import reachable
from gateway.errors import ApiError

T = TypeVar("T")
AnyRequest = Request[Any, Any, Any]

KEPT = timedelta(days=1)
MOST_CHARACTERS = 255
"""Of an Idempotency-Key."""
REPORT_SECONDS = 15.0
"""How long an answer may take before the database is taken for away."""
_NONCE_BYTES = 12


class Admin:
    """What a route that reads works with."""

    def __init__(self, engine: AsyncEngine, caller: Caller) -> None:
        self._engine = engine
        self.caller = caller

    def org(self, asked: UUID | None) -> UUID | None:
        """Of which organisation things are listed: the asked one, or the caller's own. None: of all."""
        if asked is not None:
            refuse_other_org(self.caller, asked)
        return asked or self.caller.org_id

    def user(self, asked: UUID | None) -> UUID | None:
        """Likewise of users: a member sees what is their own."""
        own = self.caller.user_id
        if own is not None and asked not in (None, own):
            raise ApiError(404, "not_found", "A member sees what is their own.")
        return asked or own

    @contextlib.asynccontextmanager
    async def read(self, seconds: float = REPORT_SECONDS) -> AsyncIterator[AsyncConnection]:
        """One snapshot, read only. Raises ApiError 503 when the database is away, or takes longer than `seconds`."""
        async with reachable(seconds), self.snapshot() as conn:
            yield conn

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[AsyncConnection]:
        """The same for as long as it takes: for what is streamed as slowly as its reader reads."""
        async with self._engine.connect() as conn:
            await conn.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            yield conn


class Writer(Admin):
    """What a route that changes something works with. `secret`: 32 bytes that the database does not know.

    `key`: the request's Idempotency-Key.
    """

    def __init__(self, engine: AsyncEngine, secret: bytes, request: AnyRequest, key: str | None) -> None:
        super().__init__(engine, request.state.caller)
        self._secret = secret
        self._request = request
        self._key = key

    async def write(
        self, work: Callable[[AsyncConnection], Awaitable[T]], seconds: float = REPORT_SECONDS
    ) -> Response[T]:
        """The answer of `work`, done in one transaction; of its first time, when the request is sent again.

        What `work` refuses (ValueError, ApiError) is not remembered and changes nothing.
        """
        async with reachable(seconds), self._engine.begin() as conn:
            await act_as(conn, self.caller.actor)
            if self._key is None:
                return self._response(msgspec.json.encode(await work(conn)))
            return await self._once(conn, self._key, work)

    async def _once(
        self, conn: AsyncConnection, key: str, work: Callable[[AsyncConnection], Awaitable[T]]
    ) -> Response[T]:
        row = idempotent_write.c
        key_hash = hashlib.sha256(msgspec.json.encode([self.caller.actor, key])).digest()
        request_hash = await self._request_hash()
        await conn.execute(delete(idempotent_write).where(row.key_hash == key_hash, row.expires_at <= func.now()))
        claim = insert(idempotent_write).values(
            key_hash=key_hash, request_hash=request_hash, expires_at=func.now() + KEPT
        )
        # An equal key that another transaction has just inserted is waited for here, until that one ends.
        claimed = await conn.execute(claim.on_conflict_do_nothing().returning(row.key_hash))
        if claimed.first() is None:
            found = (await conn.execute(select(idempotent_write).where(row.key_hash == key_hash))).one()
            if found.request_hash != request_hash:
                text = "This Idempotency-Key came with another request before. Use a new one for a new request."
                raise ApiError(422, "idempotency_key_reused", text)
            return self._response(self._opened(key, found.answer, request_hash), {"idempotency-replayed": "true"})
        answer = msgspec.json.encode(await work(conn))
        sealed = self._sealed(key, answer, request_hash)
        await conn.execute(update(idempotent_write).where(row.key_hash == key_hash).values(answer=sealed))
        return self._response(answer)

    async def _request_hash(self) -> bytes:
        url = self._request.url
        parts = [self._request.method, url.path, url.query, await self._request.body()]
        return hashlib.sha256(msgspec.json.encode(parts)).digest()

    def _cipher(self, key: str) -> AESGCM:
        return AESGCM(hmac.digest(self._secret, key.encode("utf-8", "surrogatepass"), "sha256"))

    def _sealed(self, key: str, answer: bytes, request_hash: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher(key).encrypt(nonce, answer, request_hash)

    def _opened(self, key: str, sealed: bytes, request_hash: bytes) -> bytes:
        try:
            return self._cipher(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], request_hash)
        except InvalidTag:
            text = "This was done already, under another admin key, so its answer can be read no more. Look it up."
            raise ApiError(409, "answer_lost", text) from None

    def _response(self, answer: bytes, headers: dict[str, str] | None = None) -> Response[Any]:
        status = self._request.route_handler.status_code
        body = b"" if status == 204 else answer
        return Response(body, status_code=status, headers=headers, media_type="application/json")


async def forget_old_writes(engine: AsyncEngine) -> None:
    """Drop the answers that nobody can ask for again; a job of housekeeping."""
    async with engine.begin() as conn:
        await conn.execute(delete(idempotent_write).where(idempotent_write.c.expires_at <= func.now()))
