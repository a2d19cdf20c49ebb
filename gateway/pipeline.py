"""One request's life, from socket to ledger. Read `Pipeline.chat` and `Pipeline._answer` from top to bottom.

The key is checked before the body is read: a caller without one cannot make us hold its bytes, and everything that
happens after it, even a body that is no JSON, is in the ledger under somebody's name.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import structlog

from billing.spool import Spool, SpoolError
from gateway.admission import Admission
from gateway.api.health import MIN_FREE_BYTES
from gateway.api.openai import decode_chat, error_body
from gateway.auth import Keys
from gateway.call import Call
from gateway.dispatch import Dispatcher
from gateway.errors import ApiError, ClientGoneError, unavailable
from gateway.exchange import Exchange
from gateway.operation import CLIENT_CLOSED_STATUS, Operation, Priced
from gateway.prices import Prices
from gateway.relay import StreamRelay, relay_whole
from gateway.routing.router import Router
from gateway.settings import ROLES, Settings
from gateway.settlement import price_attempt
from gateway.telemetry import Metrics, Tracing
from gateway.upstreams.frames import DONE
from gateway.upstreams.transport import Reply

ABORT_RETRY_SECONDS = 0.05
FULL_RETRY_SECONDS = 30
TAIL_SECONDS = 0.2
"""How long the end of an upstream's stream is awaited after its [DONE], to use the connection again."""

log = structlog.get_logger()


class Pipeline:
    def __init__(
        self,
        settings: Settings,
        keys: Keys,
        router: Router,
        prices: Prices,
        admission: Admission,
        dispatcher: Dispatcher,
        spool: Spool,
        tracing: Tracing,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._router = router
        self._prices = prices
        self._admission = admission
        self._dispatcher = dispatcher
        self._spool = spool
        self._tracing = tracing
        self._metrics = metrics
        self._serving: set[asyncio.Task[Any]] = set()

    async def finish(self, seconds: float) -> None:
        """Wait until the requests being served have their rows, at most so long."""
        if self._serving:
            await asyncio.wait(self._serving, timeout=seconds)

    async def chat(self, exchange: Exchange) -> None:
        """Serve one chat completion: exactly one row for whatever becomes of it once the key is known."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._chat(exchange)
        finally:
            self._serving.discard(task)

    async def _chat(self, exchange: Exchange) -> None:
        operation = Operation()
        context = self._tracing.incoming(exchange.headers)
        attributes = {"farthing.operation_id": str(operation.id)}
        with (
            self._metrics.in_flight.track_inprogress(),
            self._tracing.tracer.start_as_current_span("operation", context, attributes=attributes) as span,
        ):
            try:
                await self._serve(operation, exchange)
            except ClientGoneError:
                self._client_closed(operation)
                await self._record_end(operation)
            except ApiError as error:
                operation.end(error.outcome, error.status, error.message)
                await self._record_end(operation)
                await self._refuse(operation, exchange, error)
            except asyncio.CancelledError:  # the grace time after SIGTERM is over
                self._cut(operation, "the gateway stopped")
                await self._record_end(operation)
                await self._refuse(operation, exchange, unavailable("The gateway is stopping."))
                raise
            except Exception:
                log.exception("request failed", operation=str(operation.id))
                self._cut(operation, "internal error")
                await self._record_end(operation)
                text = f"The gateway failed on this request; its log has the reason under {operation.id}."
                await self._refuse(operation, exchange, ApiError(500, "internal_error", text))
            finally:
                span.set_attribute("farthing.status", operation.status)

    async def _serve(self, operation: Operation, exchange: Exchange) -> None:
        limits = self._settings.limits
        operation.principal = await self._keys.authenticate(exchange.headers.get("authorization"))
        if exchange.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "unsupported_encoding", "Send the body without Content-Encoding.")
        operation.call = decode_chat(await exchange.read_body(limits.body_bytes, limits.body_seconds))
        await self._while_connected(operation, exchange, operation.call)

    async def _answer(self, operation: Operation, exchange: Exchange, call: Call) -> None:
        model = self._route(operation, call)
        self._refuse_without_room()
        output_cap = await self._admit(operation, call, model)
        async with self._dispatch(operation, call, model, output_cap) as reply:
            headers = self._headers(operation)

            async def record() -> list[Priced]:
                return await self._record(operation)

            if call.stream:
                await StreamRelay(operation, call, exchange, record).run(reply, headers)
            else:
                await relay_whole(operation, exchange, reply, headers, record)
            await reply.drain(TAIL_SECONDS)

    def _route(self, operation: Operation, call: Call) -> str:
        with self._tracing.tracer.start_as_current_span("route") as span:
            wanted = call.requested_model
            if wanted == "auto":
                decision = self._router.route(call)
                operation.role, operation.score = decision.role, decision.score
                operation.reasons = list(decision.reasons)
                operation.model = self._settings.roles[decision.role]
            elif wanted in ROLES:
                operation.role = "small" if wanted == "small" else "large"
                operation.model = self._settings.roles[operation.role]
            elif wanted in self._settings.models:
                operation.model = wanted
            else:
                names = ", ".join(["auto", *ROLES, *self._settings.models])
                text = f"The model {wanted[:100]!r} does not exist. There are: {names}."
                raise ApiError(404, "model_not_found", text, param="model")
            span.set_attribute("farthing.model", operation.model)
            return operation.model

    def _refuse_without_room(self) -> None:
        """Raise ApiError 503 while the answer's row would not fit on the disk: nothing is computed that nobody pays."""
        try:
            room = self._spool.free_bytes() >= MIN_FREE_BYTES
        except OSError as error:
            log.critical("the spool is not there", reason=str(error))
            room = False
        if not room:
            raise unavailable("The disk under the ledger has no room.", retry_after=FULL_RETRY_SECONDS)

    async def _admit(self, operation: Operation, call: Call, model: str) -> int | None:
        with self._tracing.tracer.start_as_current_span("admit"):
            return await self._admission.admit(operation, call, model, self._prices.book())

    @contextlib.asynccontextmanager
    async def _dispatch(
        self, operation: Operation, call: Call, model: str, output_cap: int | None
    ) -> AsyncIterator[Reply]:
        with self._tracing.tracer.start_as_current_span("dispatch") as span:
            reply = await self._dispatcher.open(operation, call, model, output_cap, self._tracing.outgoing())
            try:
                yield reply
            finally:
                await reply.close()
                span.set_attribute("farthing.attempts", len(operation.attempts))

    async def _while_connected(self, operation: Operation, exchange: Exchange, call: Call) -> None:
        """Run the answer until it is given or the caller leaves; then call the generation back, wait for its account.

        Raises ClientGoneError, or what the answer raises.
        """
        answer = asyncio.create_task(self._answer(operation, exchange, call))
        gone = asyncio.create_task(exchange.wait_gone())
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and not exchange.complete:
                await self._call_back(operation, answer)
            if exchange.gone:
                answer.cancel()
                await asyncio.wait({answer})
                raise ClientGoneError
            await answer
        finally:
            gone.cancel()
            answer.cancel()
            await asyncio.wait({answer, gone})
            if not answer.cancelled():
                answer.exception()  # seen, even where the caller left first

    async def _call_back(self, operation: Operation, answer: asyncio.Task[None]) -> None:
        deadline = time.monotonic() + self._settings.limits.drain_seconds
        while not answer.done() and (flight := operation.flight) is not None and time.monotonic() < deadline:
            if await flight.abort():
                await asyncio.wait({answer}, timeout=deadline - time.monotonic())
                return
            if not flight.upstream.is_engine:
                return
            await asyncio.wait({answer}, timeout=ABORT_RETRY_SECONDS)  # it may not have read the request yet

    def _client_closed(self, operation: Operation) -> None:
        operation.end("client_closed", CLIENT_CLOSED_STATUS)
        if operation.attempts and operation.attempts[-1].ended is None:
            operation.attempts[-1].end("client_closed")

    def _cut(self, operation: Operation, reason: str) -> None:
        operation.end("upstream_error", 500, reason)
        if operation.attempts and operation.attempts[-1].ended is None:
            operation.attempts[-1].end("upstream_error", reason)

    async def _record(self, operation: Operation) -> list[Priced]:
        """Settle and spool the row, once; on return it survives any crash. Raises ApiError 503 when the disk fails."""
        if operation.priced is not None or operation.principal is None:
            return operation.priced or []
        with self._tracing.tracer.start_as_current_span("settle"):
            try:
                operation.priced = self._settle(operation)
                record = operation.record(operation.priced, self._settings.currency)
            except Exception:  # whatever it is, the request has a row and its hold ends
                log.exception("settling failed", operation=str(operation.id))
                operation.priced = [Priced.unknown() for _ in operation.attempts]
                record = operation.record(operation.priced, self._settings.currency)
            self._metrics.observe(record)
            log.info("operation", id=str(record.id), status=record.status, model=record.model, http=record.http_status)
            try:
                await self._spool.append(record)
            except SpoolError as error:
                log.critical("operation not recorded", operation=str(operation.id), reason=str(error))
                await self._admission.release(operation)
                raise unavailable("The ledger cannot record this request.", retry_after=FULL_RETRY_SECONDS) from error
            return operation.priced

    async def _record_end(self, operation: Operation) -> None:
        """Record what ended badly: the answer is an error in any case, and a failing disk is in the log."""
        with contextlib.suppress(ApiError):
            await self._record(operation)

    def _settle(self, operation: Operation) -> list[Priced]:
        if not operation.attempts:
            return []
        assert operation.call is not None
        call, book = operation.call, self._prices.book()
        return [price_attempt(attempt, call, book) for attempt in operation.attempts]

    def _headers(self, operation: Operation) -> dict[str, str]:
        headers = {"x-farthing-trace-id": str(operation.id)}
        if operation.model is not None:
            headers["x-farthing-model"] = operation.model
            headers["x-farthing-route"] = operation.route
        return headers

    async def _refuse(self, operation: Operation, exchange: Exchange, error: ApiError) -> None:
        if exchange.complete:
            return
        if exchange.started:  # a stream: its status is sent, so the error is its last frame
            await exchange.write(b"data: " + error_body(error) + b"\n\n" + DONE, last=True)
            return
        await exchange.respond(error.status, {**self._headers(operation), **error.headers}, error_body(error))
