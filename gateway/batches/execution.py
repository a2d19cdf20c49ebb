"""Runs lines of batches: each is a request to this process's own application, on behalf of the key that made the batch.

The key is looked at for every line, so a revoked one stops its batches. The line's result is written before the process
lets go of the line, as often as the database must be asked; an answer that tells to come back, or that broke, puts the
line off instead. Only a process that dies between the answer and its result makes a line run, and be charged, twice.
"""

import asyncio
from collections.abc import Callable

import structlog
from litestar.types import ASGIApp
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.people import find_principal
from gateway.api.openai import error_body
from gateway.auth import refuse_ended
from gateway.batches import claims
from gateway.batches.claims import Claimant, ClaimedLine, Result
from gateway.batches.files import read_span
from gateway.batches.lines import answered, body_of, unanswered, usage_of
from gateway.batches.names import batch_name
from gateway.batches.outcome import MAX_TRIES, gave_up, is_busy, seconds_to_wait
from gateway.batches.results import Results, lasting
from gateway.database import transaction
from gateway.errors import ApiError
from gateway.trusted import Answer, Trusted, ask

PRIORITY = 100
"""Interactive requests have 0 unless they say otherwise; larger runs later."""

log = structlog.get_logger()


class Execution:
    """`me`: who this process claims lines as."""

    def __init__(self, engine: AsyncEngine, app: ASGIApp, me: Callable[[], Claimant], results: Results) -> None:
        self._engine = engine
        self._app = app
        self._me = me
        self._results = results
        self._calls: set[asyncio.Task[None]] = set()
        self._stopping = False

    def cut_off(self) -> None:
        """End the requests under way: their lines are given back, unless their answer is complete."""
        self._stopping = True
        for call in self._calls:
            call.cancel()

    async def run(self, line: ClaimedLine) -> None:
        """Returns when the line's result is written, or the line is given back."""
        answer = Answer() if gave_up(line) else await self._answer(line)
        wait = seconds_to_wait(answer, line.tries)
        if self._stopping and not (answer.complete and wait is None):
            await self._put_off(line, None, counts=False)
        elif wait is not None:
            await self._put_off(line, wait, counts=not is_busy(answer))
        else:
            await self._finish(line, answer)

    async def _answer(self, line: ClaimedLine) -> Answer:
        answer = Answer()
        try:
            await self._ask(line, answer)
        except ApiError as error:  # the key has ended, or the database is away
            return Answer(error.status, error.headers, bytearray(error_body(error)), True)
        except Exception:
            log.exception("line of a batch failed", batch=batch_name(line.batch_id), line=line.number)
        return answer

    async def _ask(self, line: ClaimedLine, answer: Answer) -> None:
        async with transaction(self._engine) as conn:
            principal = await find_principal(conn, line.key_id)
            raw = await read_span(conn, line.input_file_id, line.position, line.length)
        if self._stopping:
            return
        trusted = Trusted(refuse_ended(principal), "batch", PRIORITY, {"batch": batch_name(line.batch_id)})
        call = asyncio.create_task(ask(self._app, line.endpoint, body_of(raw), trusted, answer))
        self._calls.add(call)
        try:
            await asyncio.wait({call})
        finally:
            call.cancel()
            self._calls.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            raise error

    async def _put_off(self, line: ClaimedLine, seconds: float | None, *, counts: bool) -> None:
        await lasting(self._engine, lambda conn: claims.put_off_line(conn, self._me(), line, seconds, counts=counts))

    async def _finish(self, line: ClaimedLine, answer: Answer) -> None:
        failed, usage = True, {}
        if answer.complete:
            body = bytes(answer.body)
            failed = not 200 <= answer.status < 300
            usage = {} if failed else usage_of(body)
            output = answered(line.custom_id, answer.status, answer.headers.get("x-farthing-trace-id", ""), body)
        else:
            output = unanswered(line.custom_id, "no_answer", f"No answer came in {MAX_TRIES} tries.")
        await self._results.write(Result(line, output, failed, usage))
