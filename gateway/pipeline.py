"""One request's life, from socket to ledger, whatever wire format it came in. Read `serve`, `_call` and `_answer`.

The key is checked before the body is read: a caller without one cannot make us hold its bytes, and everything that
happens after it, even a body that is no JSON, is in the ledger under somebody's name.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog

from billing.charge import cached_answer_charge
from billing.payloads import Payloads
from billing.prices import PriceBook
from gateway.admission import Admission
from gateway.api.count_tokens import CountTokensSurface
from gateway.api.surface import Surface
from gateway.attribution import attribute, refuse_addresses
from gateway.auth import Keys, check_model, check_route
from gateway.call import Call
from gateway.client_address import client_address
from gateway.dispatch import Dispatcher
from gateway.errors import ApiError, ClientGoneError, unavailable
from gateway.exchange import Exchange
from gateway.keep_alive import KeepAlive
from gateway.live import Live
from gateway.operation import CLIENT_CLOSED_STATUS, Operation
from gateway.prices import Prices
from gateway.recall import LOOK_SECONDS, Recall
from gateway.recording import Recording
from gateway.relay import StreamRelay, overdue, relay_whole
from gateway.reply_headers import reply_headers
from gateway.response_cache import Kept, Lookup, ResponseCache
from gateway.rounds import Rounds
from gateway.rows import Rows
from gateway.settings import ROLES
from gateway.settlement import about_prompt
from gateway.telemetry import Metrics, Tracing
from gateway.tiers import choose_tier

TAIL_SECONDS = 0.2
"""How long the end of an upstream's stream is awaited after its [DONE], to use the connection again."""

Work = Callable[[Operation, Exchange, Any, Call], Awaitable[None]]
"""With the surface that it came by."""

log = structlog.get_logger()


class Pipeline:
    def __init__(
        self,
        live: Live,
        keys: Keys,
        prices: Prices,
        admission: Admission,
        dispatcher: Dispatcher,
        rows: Rows,
        payloads: Payloads,
        keep_alive: KeepAlive,
        tracing: Tracing,
        metrics: Metrics,
    ) -> None:
        self._live = live
        self._keys = keys
        self._prices = prices
        self._admission = admission
        self._dispatcher = dispatcher
        self._rows = rows
        self._payloads = payloads
        self._keep_alive = keep_alive
        self._tracing = tracing
        self._metrics = metrics
        self._cache = ResponseCache()
        self._recalls: Rounds[Recall] = Rounds(LOOK_SECONDS)
        self._serving: set[asyncio.Task[Any]] = set()
        metrics.in_flight.set_function(lambda: len(self._serving))
        metrics.cache_bytes.set_function(lambda: self._cache.size)

    async def finish(self, seconds: float) -> None:
        """Wait until the requests being served have their rows, at most so long."""
        if self._serving:
            await asyncio.wait(self._serving, timeout=seconds)

    def serve(self, exchange: Exchange, surface: Surface) -> Awaitable[None]:
        """Serve one request: exactly one row for whatever becomes of it once the key is known."""
        return self._serve(exchange, surface, self._answer)

    def count_tokens(self, exchange: Exchange, surface: CountTokensSurface) -> Awaitable[None]:
        """Tell how long a prompt is. It has a row too, of nothing, and counts in limits of requests."""
        return self._serve(exchange, surface, self._count)

    async def _count(self, operation: Operation, exchange: Exchange, surface: CountTokensSurface, call: Call) -> None:
        model = self._route(operation, call)
        operation.hold = await self._admission.admit_flat(operation, model)
        tokens = await self._dispatcher.count_tokens(call, model)
        await self._rows.record(operation)
        await exchange.respond(200, reply_headers(operation), surface.answer(tokens))

    async def _serve(self, exchange: Exchange, surface: Surface, work: Work) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        operation = Operation(surface.api, serving=task)
        try:
            with self._tracing.operation(operation.id, exchange.headers) as span:
                try:
                    await self._end(operation, exchange, surface, self._call(operation, exchange, surface, work))
                finally:
                    if span is not None:
                        span.set_attribute("farthing.status", operation.status)
        finally:
            self._serving.discard(task)
            if exchange.recording is not None:
                self._payloads.put(exchange.recording.payload(operation.id))

    async def _end(self, operation: Operation, exchange: Exchange, surface: Surface, work: Awaitable[None]) -> None:
        """What becomes of an operation that `work` does not bring to its end itself."""
        try:
            await work
        except ClientGoneError:
            self._client_closed(operation)
            await self._record_end(operation)
        except ApiError as error:
            operation.end(error.outcome, error.status, error.noted)
            await self._record_end(operation)
            await self._refuse(operation, exchange, surface, error)
        except asyncio.CancelledError:  # the grace time after SIGTERM is over
            self._cut(operation, "the gateway stopped")
            await self._record_end(operation)
            await self._refuse(operation, exchange, surface, unavailable("The gateway is stopping."))
            raise
        except Exception:
            log.exception("request failed", operation=str(operation.id))
            self._cut(operation, "internal error")
            await self._record_end(operation)
            text = f"The gateway failed on this request; its log has the reason under {operation.id}."
            await self._refuse(operation, exchange, surface, ApiError(500, "internal_error", text))

    async def _call(self, operation: Operation, exchange: Exchange, surface: Surface, work: Work) -> None:
        """Authenticate, decode, and do the work while the caller is there. Raises ApiError or ClientGoneError."""
        limits = self._live.settings.limits
        await self._authenticate(operation, exchange, surface.api)
        if exchange.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "unsupported_encoding", "Send the body without Content-Encoding.")
        body = await exchange.read_body(limits.body_bytes, limits.body_seconds)
        if operation.principal is not None and operation.principal.record_payloads:
            exchange.recording = Recording(exchange.headers)
            exchange.recording.request.add(body)
        call = surface.decode(body)
        call = operation.call = self._attribute(operation, exchange, call)
        recall = Recall(operation, limits.drain_seconds, self._recalls)
        exchange.watch(recall.start)
        if not call.stream:
            recall.watch()
        try:
            await work(operation, exchange, surface, call)
        except asyncio.CancelledError:
            if not recall.cancelled:
                raise
            recall.uncancel()
            if not exchange.gone:
                raise overdue(operation.attempts[-1]) from None
        except ApiError:
            if not exchange.gone:
                raise
        finally:
            exchange.unwatch()
            recall.close()
        if exchange.gone:
            raise ClientGoneError

    async def _authenticate(self, operation: Operation, exchange: Exchange, api: str) -> None:
        if exchange.trusted is not None:
            operation.principal, operation.tier = exchange.trusted.principal, exchange.trusted.tier
        else:
            proxies = self._live.settings.trusted_proxies
            address = client_address(exchange.peer_address, exchange.headers, proxies)
            operation.principal = await self._keys.authenticate(exchange.headers, address)
        check_route(operation.principal, "messages" if api == "count_tokens" else api)
        refuse_addresses(exchange.headers)

    def _attribute(self, operation: Operation, exchange: Exchange, call: Call) -> Call:
        """Who pays, and under which tags; the call as a batch's line, where it is one."""
        principal = operation.principal
        assert principal is not None
        check_model(principal, call.requested_model)
        refuse_addresses({}, call.fields if call.original is None else call.original)
        operation.attribution = attribute(principal, exchange.headers, call.tags)
        if call.api in ("messages", "count_tokens") and (betas := exchange.headers.get("anthropic-beta")) is not None:
            call = msgspec.structs.replace(call, betas=betas)
        if (trusted := exchange.trusted) is not None:
            tags = {**operation.attribution.tags, **trusted.tags}
            operation.attribution = operation.attribution._replace(tags=tags)
            return msgspec.structs.replace(call, priority=trusted.priority)
        return call

    async def _answer(self, operation: Operation, exchange: Exchange, surface: Surface, call: Call) -> None:
        model = self._route(operation, call)
        self._rows.refuse_without_room()
        operation.book = self._prices.book()
        call = choose_tier(operation, call, operation.book)
        lookup = self._look_up(operation, exchange, call, model)
        if lookup is not None and lookup.found is not None:
            await self._answer_again(operation, exchange, surface, call, lookup.found)
            return
        cap = await self._admit(operation, call, model, operation.book)

        with self._tracing.span("dispatch") as span:
            trace = self._tracing.outgoing(operation.trace_id, exchange.headers)
            answer = await self._dispatcher.open(operation, call, model, cap, trace)
            try:
                operation.dropped = answer.dropped
                found: dict[str, str] = {}
                if lookup is not None:
                    found["x-farthing-cache"] = lookup.outcome
                    exchange.tap(lookup.take)
                if call.stream:
                    writer = surface.writer(call)
                    if writer.needs_prompt_count:
                        writer.prompt_tokens = about_prompt(call)
                    self._rows.begin(operation, call)
                    with self._keep_alive.watching(exchange):
                        await StreamRelay(operation, call, exchange, writer, self._rows).run(answer, found)
                else:
                    await relay_whole(operation, call, exchange, surface, answer, found, self._rows)
                if lookup is not None:  # before the caller can ask again
                    lookup.keep(operation, exchange, call, cap)
                if not operation.attempts[-1].cut:
                    await answer.reply.drain(TAIL_SECONDS)
            finally:
                await self._dispatcher.close(operation, answer)
                if span is not None:
                    span.set_attribute("farthing.attempts", len(operation.attempts))

    def _look_up(self, operation: Operation, exchange: Exchange, call: Call, model: str) -> Lookup | None:
        """What the response cache has for the call; None where its model has no response cache."""
        settings = self._live.settings
        found = settings.models.get(model)
        if found is None or found.response_cache is None:
            return None
        assert operation.principal is not None
        with self._tracing.span("look up"):
            lookup = self._cache.look_up(settings, call, model, operation.principal, exchange)
        self._metrics.looked_up(lookup.outcome)
        return lookup

    async def _answer_again(
        self, operation: Operation, exchange: Exchange, surface: Surface, call: Call, kept: Kept
    ) -> None:
        """Give an answer out of the response cache: no attempt and no tokens, billed by its own part of the price."""
        assert operation.model is not None and operation.book is not None
        price = operation.book.sale(operation.model, operation.tier, operation.payer)
        billed = cached_answer_charge(price)
        operation.hold = await self._admission.admit_flat(operation, operation.model, billed)
        if exchange.gone:
            return
        operation.cached, operation.cached_billed = kept.record(price), billed
        operation.dropped, operation.finish_reason = kept.dropped, kept.finish_reason
        operation.reasons = [*operation.reasons, "response_cache"]
        await self._rows.record(operation)
        headers = reply_headers(operation) | {"x-farthing-cache": "hit", "age": str(int(kept.age))}
        headers["x-farthing-cached-tokens"] = "0"
        if billed is not None:
            headers["x-farthing-cost"] = f"{billed:f}"
        if call.stream:
            await exchange.start_stream(headers, surface.writer(call))
            await exchange.write(kept.body, last=True)
        else:
            await exchange.respond(200, headers, kept.body)

    def _route(self, operation: Operation, call: Call) -> str:
        with self._tracing.span("route") as span:
            settings = self._live.settings
            wanted = call.requested_model
            if wanted in settings.models:
                operation.model = wanted
            elif wanted == "auto":
                decision = self._live.router.route(call)
                operation.role, operation.score = decision.role, decision.score
                operation.reasons = list(decision.reasons)
                operation.model = settings.roles[decision.role]
            elif wanted in ROLES:
                operation.role = "small" if wanted == "small" else "large"
                operation.model = settings.roles[operation.role]
            else:
                names = ", ".join(["auto", *ROLES, *settings.models])
                text = f"The model {wanted[:100]!r} does not exist. There are: {names}."
                raise ApiError(404, "model_not_found", text, param="model")
            if span is not None:
                span.set_attribute("farthing.model", operation.model)
            return operation.model

    async def _admit(self, operation: Operation, call: Call, model: str, book: PriceBook) -> int | None:
        with self._tracing.span("admit"):
            admitted = await self._admission.admit(operation, call, model, book)
            operation.hold = admitted.hold
            operation.reserved_prompt, operation.reserved_output = admitted.prompt, admitted.output
            return admitted.cap

    def _client_closed(self, operation: Operation) -> None:
        operation.end("client_closed", CLIENT_CLOSED_STATUS)
        if operation.attempts and operation.attempts[-1].ended is None:
            operation.attempts[-1].end("client_closed")

    def _cut(self, operation: Operation, reason: str) -> None:
        operation.end("upstream_error", 500, reason)
        if operation.attempts and operation.attempts[-1].ended is None:
            operation.attempts[-1].end("upstream_error", reason)

    async def _record_end(self, operation: Operation) -> None:
        """Record what ended badly: the answer is an error in any case, and a failing disk is in the log."""
        with contextlib.suppress(ApiError):
            await self._rows.record(operation)

    async def _refuse(self, operation: Operation, exchange: Exchange, surface: Surface, error: ApiError) -> None:
        error.request_id = str(operation.id)
        await exchange.refuse(error, reply_headers(operation), surface.error(error))
