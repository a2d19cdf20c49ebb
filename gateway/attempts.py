"""One call on one model's upstreams: asks one of them, once, and says what came of it."""

import time
from collections.abc import Collection, Mapping
from uuid import UUID

import msgspec

from gateway import failures
from gateway.call import Call
from gateway.errors import ApiError
from gateway.failures import NoAnswerError
from gateway.operation import Attempt, Operation
from gateway.upstreams.answer import Answer, ReportedError
from gateway.upstreams.dialect import Limits, Request
from gateway.upstreams.frames import MalformedError
from gateway.upstreams.pool import Pool
from gateway.upstreams.sse import EventTooLargeError
from gateway.upstreams.target import Flight, Target
from gateway.upstreams.transport import BrokenError, Reply, SilentError, UnreachableError


class Started(msgspec.Struct, frozen=True, eq=False):
    request: Request
    attempt: Attempt
    flight: Flight


class Opened(msgspec.Struct, frozen=True, eq=False):
    """An answer that has begun, a whole one with all of it; whose attempt it is, and where it comes from."""

    answer: Answer
    attempt: Attempt
    flight: Flight


class Asking:
    def __init__(
        self,
        operation: Operation,
        call: Call,
        pool: Pool,
        max_output: int | None,
        trace: Mapping[str, str],
        begin_seconds: float,
    ) -> None:
        """`begin_seconds`: how long a stream's first frame is awaited before its caller is told that it has begun."""
        assert operation.principal is not None
        self.operation = operation
        self.pool = pool
        self._call = call
        self._max_output = max_output
        self._trace = trace
        self._begin_seconds = begin_seconds
        self._tenant: UUID = operation.principal.org_id
        self._chain = pool.chain(call)

    @property
    def is_stream(self) -> bool:
        return self._call.stream

    async def choose(self, tried: Collection[Target]) -> Target | None:
        return await self.pool.choose(self._call, self._chain, self._tenant, tried)

    def start(self, target: Target) -> Started:
        """Take a place at `target` for an attempt, which `finish` makes. Raises NoAnswerError."""
        operation = self.operation
        try:
            limits = Limits(self._max_output, self.pool.settings.max_output)
            request = target.upstream.dialect.request(self._call, target.name, limits, self.pool.settings.drop_params)
        except ApiError as error:
            raise NoAnswerError(error, "elsewhere", falls_back=False) from error
        number = operation.attempts[-1].number + 1 if operation.attempts else 1
        attempt = Attempt(number, target.upstream.name, target.model, target.upstream.is_engine)
        operation.attempts.append(attempt)
        flight = operation.flight = Flight(target, f"{operation.trace_id}.{number}")
        target.enter()
        return Started(request, attempt, flight)

    async def finish(self, started: Started) -> Opened:
        """Raises NoAnswerError. Where nothing was sent, or an engine was still loading, there was no attempt."""
        request, attempt, flight = started.request, started.attempt, started.flight
        target = flight.target
        began = time.monotonic()
        try:
            reply = await target.upstream.send(request, flight.request_id, self._tenant, self._trace)
            if reply.status != 200:
                raise await self._refused(target, attempt, reply)
            attempt.http_status = reply.status
            answer = Answer(reply, target.upstream.dialect.decoder(self._call), request.dropped)
            await self._begin(answer, attempt)
        except (UnreachableError, BrokenError, MalformedError, ReportedError, EventTooLargeError) as error:
            self._left(flight)
            raise self._meaning(error, target, attempt) from error
        except NoAnswerError:
            self._left(flight)
            raise
        except BaseException:  # the caller left, or nobody needs this answer any more
            self.abandon(started)
            raise
        target.answered(self._call.stream, time.monotonic() - began)
        if self._chain:
            target.sent.add(self._chain)
        return Opened(answer, attempt, flight)

    def abandon(self, started: Started) -> None:
        """Give the place back, whatever might have come of it."""
        self._left(started.flight)
        started.flight.target.breaker.abandoned()

    async def _begin(self, answer: Answer, attempt: Attempt) -> None:
        """While nothing has gone to the caller another try is safe, so it is seen first whether this is an answer."""
        try:
            if self._call.stream:
                await answer.begin(self._begin_seconds)
            else:
                await answer.read()
        except BaseException:
            await answer.reply.close()
            raise
        finally:
            if answer.frame is not None:
                attempt.saw(answer.frame)

    def _left(self, flight: Flight) -> None:
        flight.target.leave()
        if self.operation.flight is flight:
            self.operation.flight = None

    def _meaning(self, error: Exception, target: Target, attempt: Attempt) -> NoAnswerError:
        """The breaker and the attempt are told."""
        upstream = target.upstream
        if isinstance(error, UnreachableError):
            target.failed(away=True)
            self.operation.attempts.remove(attempt)
            return failures.away(upstream)
        target.failed()
        attempt.billable = False
        noted = attempt.noted(str(error)) if isinstance(error, ReportedError) else str(error)
        attempt.end("upstream_error", noted)
        if attempt.overdue or isinstance(error, SilentError):
            return failures.silent(upstream)
        if not isinstance(error, BrokenError):
            return failures.no_answer(upstream, str(error), noted)
        return failures.incomplete(upstream, error) if attempt.http_status else failures.broken(upstream, error)

    async def _refused(self, target: Target, attempt: Attempt, reply: Reply) -> NoAnswerError:
        upstream, status = target.upstream, reply.status
        body = await _error_body(reply)
        if status == 503 and upstream.is_engine:
            target.failed(away=True)
            self.operation.attempts.remove(attempt)
            return failures.loading(upstream)
        failure = failures.of_reply(upstream, status, reply.headers, body)
        if failure.again == "never" or status == 429:
            target.works()
        else:
            target.failed()
        if failure.retry_after:
            target.rest(failure.retry_after)
        attempt.http_status = status
        attempt.refused = True
        attempt.billable = False
        attempt.end(failure.error.outcome, failure.error.noted)
        return failure


async def _error_body(reply: Reply) -> bytes:
    try:
        return await reply.read()
    except BrokenError:
        return b""
    finally:
        await reply.close()
