"""The response cache: answers in this process's memory, to be given again to who asks the very same.

An answer is kept as the bytes that its caller was sent, so that `stream` is part of its key: a stream is answered by a
stream, in the same dialect. Only what ended well is kept (`Lookup.keep`). Nothing of it is ever on disk, and a reload
of the configuration empties it.
"""

import re
import time
from collections import OrderedDict
from decimal import Decimal
from uuid import UUID

import msgspec

from billing.people import Principal
from billing.prices import Price
from billing.records import UNSETTLED, CachedAnswer
from gateway.answer_key import answer_key
from gateway.call import Call
from gateway.exchange import Exchange
from gateway.keep_alive import COMMENT
from gateway.operation import Operation
from gateway.settings import Settings

LARGEST_SHARE = 8
"""An answer that would take more than this part of the cache is not kept."""
OVERHEAD_BYTES = 1024
"""Of an answer, besides its bytes: a little more than what Python takes for it."""
_ENDED_WELL = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
_MAX_AGE = re.compile(r"max-age=\"?(\d{1,9})\"?", re.ASCII)


class Kept(msgspec.Struct, frozen=True):
    """An answer, and what the operation that it was made for came to."""

    body: bytes
    made_at: float
    """On the monotonic clock, as `ends_at`."""
    ends_at: float
    finish_reason: str | None
    dropped: tuple[str, ...]
    operation_id: UUID
    prompt_tokens: int
    completion_tokens: int
    billed: Decimal | None
    cost: Decimal | None

    @property
    def size(self) -> int:
        return len(self.body) + OVERHEAD_BYTES

    def record(self, price: Price | None) -> CachedAnswer:
        """What the row of an operation says that gets it. `price`: what that is charged with."""
        return CachedAnswer(
            cached_from=self.operation_id,
            saved_prompt_tokens=self.prompt_tokens,
            saved_completion_tokens=self.completion_tokens,
            saved_billed=self.billed,
            saved_cost=self.cost,
            price_version_id=price.id if price else None,
            price_override_id=price.override_id if price else None,
        )

    @property
    def age(self) -> float:
        """In seconds."""
        return time.monotonic() - self.made_at


class ResponseCache:
    """At most `limits.response_cache_bytes`: what was not asked for longest goes first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._settings: Settings | None = None
        self.size = 0
        """In bytes."""

    def __len__(self) -> int:
        return len(self._kept)

    def look_up(self, settings: Settings, call: Call, model: str, principal: Principal, exchange: Exchange) -> "Lookup":
        """What there is for a call of a model that has a response cache."""
        if settings is not self._settings:
            self._kept.clear()
            self.size, self._settings = 0, settings
        wanted = settings.models[model].response_cache
        assert wanted is not None, "asked only where it is on"
        control = exchange.headers.get("cache-control", "").lower()
        said = {word.strip() for word in control.split(",")}
        lookup = Lookup(self, settings, model, wanted.seconds)
        if exchange.trusted is not None or "no-store" in said:
            return lookup
        try:
            key = lookup.key = answer_key(call, model, principal, wanted.shared_by)
        except (RecursionError, ValueError):  # what is no JSON is its upstream's to judge
            return lookup
        if "no-cache" in said:
            return lookup
        lookup.outcome = "miss"
        found = self._get(key)
        youngest = min((int(given[1]) for word in said if (given := _MAX_AGE.fullmatch(word))), default=None)
        if found is not None and (youngest is None or found.age <= youngest):
            lookup.found, lookup.outcome = found, "hit"
        return lookup

    def put(self, key: bytes, kept: Kept, settings: Settings) -> None:
        """Keep it, unless the configuration has changed since it was asked for."""
        if settings is not self._settings:
            return
        limit = settings.limits.response_cache_bytes
        if kept.size > limit // LARGEST_SHARE:
            return
        self._drop(key)
        self._kept[key] = kept
        self.size += kept.size
        while self.size > limit:
            self._drop(next(iter(self._kept)))

    def _get(self, key: bytes) -> Kept | None:
        found = self._kept.get(key)
        if found is None:
            return None
        if found.ends_at <= time.monotonic():
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return found

    def _drop(self, key: bytes) -> None:
        old = self._kept.pop(key, None)
        if old is not None:
            self.size -= old.size


class Lookup:
    """One request's: what was found, or else what is to be kept. `outcome` is what the caller is told."""

    def __init__(self, cache: ResponseCache, settings: Settings, model: str, seconds: float) -> None:
        self.outcome = "bypass"
        self.key: bytes | None = None
        """None: its answer is not kept."""
        self.found: Kept | None = None
        self._cache = cache
        self._settings = settings
        self._model = model
        self._seconds = seconds
        self._pieces: list[bytes] = []
        self._size = 0
        self._most = settings.limits.response_cache_bytes // LARGEST_SHARE

    def take(self, piece: bytes) -> None:
        """What its caller is sent. Signs of life between the pieces are no part of it."""
        if piece == COMMENT:
            return
        self._size += len(piece)
        if self._size > self._most:
            self._pieces.clear()
        else:
            self._pieces.append(piece)

    def keep(self, operation: Operation, exchange: Exchange, call: Call, cap: int | None) -> None:
        """Keep the answer that the caller was sent, if it is one that others may have too.

        It is whole, of the model that was asked for rather than a fallback, and no shorter than what the caller asked
        for: a budget that ends soon (`cap`) cuts nobody else's answer.
        """
        key, attempt = self.key, operation.attempts[-1]
        if key is None or self._size > self._most or not exchange.complete or exchange.gone:
            return
        if (operation.status, operation.http_status, attempt.status) != ("ok", 200, "ok") or attempt.cut:
            return
        if call.kind != "embedding" and operation.finish_reason not in _ENDED_WELL:
            return
        if cap is not None and (operation.finish_reason == "length" or call.choices > 1):
            return
        if attempt.model != self._model or not operation.priced:
            return
        priced = operation.priced[-1]
        if priced.usage_flag == UNSETTLED:
            return
        now = time.monotonic()
        kept = Kept(
            body=b"".join(self._pieces),
            made_at=now,
            ends_at=now + self._seconds,
            finish_reason=operation.finish_reason,
            dropped=operation.dropped,
            operation_id=operation.id,
            prompt_tokens=priced.tokens.prompt_tokens,
            completion_tokens=priced.tokens.completion_tokens,
            billed=priced.billed,
            cost=priced.cost,
        )
        self._cache.put(key, kept, self._settings)
