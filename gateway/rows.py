"""The rows of operations: settled, written to the spool before an answer's end goes out, and what follows from that."""

import asyncio
from functools import partial

import structlog

from billing.records import OperationRecord
from billing.spool import Spool, SpoolError
from gateway.admission import Admission
from gateway.api.health import MIN_FREE_BYTES
from gateway.call import Call
from gateway.errors import ApiError, unavailable
from gateway.live import Live
from gateway.operation import Operation, Priced
from gateway.settlement import about_prompt, price_attempt
from gateway.telemetry import Metrics, Tracing

FULL_RETRY_SECONDS = 30

log = structlog.get_logger()


class Row:
    """A settled operation's row, on its way to the disk."""

    __slots__ = ("_arrived", "_failure", "_tracing", "_waiter", "priced")

    def __init__(self, priced: list[Priced], tracing: Tracing) -> None:
        self.priced = priced
        self._tracing = tracing
        self._arrived = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def written(self) -> None:
        """Return when it survives any crash. Raises ApiError 503 when the disk fails."""
        if not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            with self._tracing.span("flush"):
                await self._waiter
        if self._failure is not None:
            raise _unrecorded() from self._failure

    def arrives(self, failure: Exception | None) -> None:
        """Whether or not somebody waits for it."""
        self._arrived, self._failure = True, failure
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Rows:
    def __init__(self, live: Live, spool: Spool, admission: Admission, tracing: Tracing, metrics: Metrics) -> None:
        self._live = live
        self._spool = spool
        self._admission = admission
        self._tracing = tracing
        self._metrics = metrics

    def refuse_without_room(self) -> None:
        """Raise ApiError 503 while the answer's row would not fit on the disk: nothing is computed that nobody pays."""
        try:
            room = self._spool.free_bytes() >= MIN_FREE_BYTES
        except OSError as error:
            log.critical("the spool is not there", reason=str(error))
            room = False
        if not room:
            raise unavailable("The disk under the ledger has no room.", retry_after=FULL_RETRY_SECONDS)

    def begin(self, operation: Operation, call: Call) -> None:
        """From here on the stream has a row, also if this process is killed. Raises ApiError 503 without room."""
        try:
            operation.slot = self._spool.begin(operation.begun(about_prompt(call), self._live.settings.currency))
        except SpoolError as error:
            log.critical("stream not begun", operation=str(operation.id), reason=str(error))
            raise _unrecorded() from error

    async def record(self, operation: Operation) -> None:
        """Settle and write the row, once; on return it survives any crash. Raises ApiError 503 when the disk fails."""
        if operation.priced is None and operation.principal is not None:
            await self.settle(operation).written()

    def settle(self, operation: Operation) -> Row:
        """The operation's money, and its row on its way to the disk. Once; raises ApiError 503."""
        with self._tracing.span("settle"):
            currency = self._live.settings.currency
            try:
                operation.priced = _priced(operation, currency)
                record = operation.record(operation.priced, currency)
            except Exception:  # whatever it is, the request has a row and its hold ends
                log.exception("settling failed", operation=str(operation.id))
                operation.priced = [Priced.unknown() for _ in operation.attempts]
                record = operation.record(operation.priced, currency)
        row = Row(operation.priced, self._tracing)
        with self._tracing.span("record"):
            try:
                self._spool.write(record, partial(self._written, operation, record, row), operation.slot)
            except Exception as error:
                self._lost(operation, error)
                raise _unrecorded() from error
        return row

    def _written(self, operation: Operation, record: OperationRecord, row: Row, failure: Exception | None) -> None:
        """Also where nobody waits any more: nothing may stay held."""
        row.arrives(failure)
        loop = asyncio.get_running_loop()
        if failure is None:
            loop.call_soon(self._recorded, operation, record)  # once the answer is on its way
        else:
            loop.call_soon(self._lost, operation, failure)

    def _lost(self, operation: Operation, error: Exception) -> None:
        known = isinstance(error, SpoolError)
        log.critical(
            "operation not recorded",
            operation=str(operation.id),
            reason=str(error),
            exc_info=None if known else error,
        )
        if operation.hold is not None:
            self._admission.release(operation.hold)

    def _recorded(self, operation: Operation, record: OperationRecord) -> None:
        if operation.hold is not None:
            self._admission.settle(operation.hold, record.billed, _used(operation))
        self._metrics.observe(record)


def _priced(operation: Operation, currency: str) -> list[Priced]:
    if not operation.attempts:
        return []
    book = operation.book
    assert book is not None, "what was attempted was admitted"
    return [price_attempt(attempt, operation, book, currency) for attempt in operation.attempts]


def _unrecorded() -> ApiError:
    return unavailable("The ledger cannot record this request.", retry_after=FULL_RETRY_SECONDS)


def _used(operation: Operation) -> int:
    """Tokens that count in a caller's limits: those of the attempt it pays for, as far as there is one."""
    priced = zip(operation.attempts, operation.priced or (), strict=False)
    return sum(p.tokens.prompt_tokens + p.tokens.completion_tokens for attempt, p in priced if attempt.billable)
