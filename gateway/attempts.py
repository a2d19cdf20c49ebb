"""One call on one model's upstreams: asks one of them, once, and says what came of it."""

import time
from collections.abc import Collection, Mapping
from typing import NamedTuple
from uuid import UUID

from gateway import failures
from gateway.call import Call
from gateway.errors import ApiError
from gateway.failures import NoAnswerError
from gateway.operation import Attempt, Operation
from gateway.upstreams.dialect import Request
from gateway.upstreams.frames import Answer
from gateway.upstreams.pool import Pool
from gateway.upstreams.target import Flight, Target
from gateway.upstreams.transport import BrokenError, Reply, SilentError, UnreachableError


class Started(NamedTuple):
    request: Request
    attempt: Attempt
    flight: Flight


class Opened(NamedTuple):
    """An answer whose headers are here, whose attempt it is, and where it comes from."""

    answer: Answer
    attempt: Attempt
    flight: Flight


class Asking:
    def __init__(
        self, operation: Operation, call: Call, pool: Pool, max_output: int | None, trace: Mapping[str, str]
    ) -> None:
        assert operation.principal is not None
        self.operation = operation
        self.pool = pool
        self._call = call
        self._max_output = max_output
        self._trace = trace
        self._tenant: UUID = operation.principal.org_id

    @property
    def is_stream(self) -> bool:
        return self._call.stream

    async def choose(self, tried: Collection[Target]) -> Target | None:
        return await self.pool.choose(self._call, self._tenant, tried)

    def start(self, target: Target) -> Started:
        """The request for `target`, and the attempt that it is. Raises NoAnswerError if it cannot honour it."""
        operation = self.operation
        try:
            request = target.upstream.dialect.request(
                self._call, target.name, self._max_output, self.pool.settings.drop_params
            )
        except ApiError as error:
            raise NoAnswerError(error, "elsewhere", falls_back=False) from error
        number = operation.attempts[-1].number + 1 if operation.attempts else 1
        attempt = Attempt(number, target.upstream.name, target.model, target.upstream.is_engine)
        operation.attempts.append(attempt)
        flight = operation.flight = Flight(target, f"{operation.id}.{number}")
        return Started(request, attempt, flight)

    async def finish(self, started: Started) -> Opened:
        """Raises NoAnswerError. Where nothing was sent, or an engine was still loading, there was no attempt."""
        request, attempt, flight = started
        target = flight.target
        began = time.monotonic()
        target.enter()
        try:
            reply = await target.upstream.send(request, flight.request_id, self._tenant, self._trace)
            if reply.status != 200:
                raise await self._refused(target, attempt, reply)
        except (UnreachableError, BrokenError) as error:
            self._left(flight)
            raise self._meaning(error, target, attempt) from error
        except NoAnswerError:
            self._left(flight)
            raise
        except BaseException:  # the caller left, or nobody needs this answer any more
            self._left(flight)
            target.breaker.abandoned()
            raise
        target.answered(self._call.stream, time.monotonic() - began)
        self.pool.sent(self._call, target)
        attempt.http_status = reply.status
        decoder = target.upstream.dialect.decoder(self._call)
        return Opened(Answer(reply, decoder, request.dropped), attempt, flight)

    def _left(self, flight: Flight) -> None:
        flight.target.leave()
        if self.operation.flight is flight:
            self.operation.flight = None

    def _meaning(self, error: UnreachableError | BrokenError, target: Target, attempt: Attempt) -> NoAnswerError:
        """The breaker and the attempt are told."""
        if isinstance(error, UnreachableError):
            target.failed(away=True)
            self.operation.attempts.remove(attempt)
            return failures.away(target.upstream)
        target.failed()
        attempt.billable = False
        attempt.end("upstream_error", str(error))
        if isinstance(error, SilentError):
            return failures.silent(target.upstream)
        return failures.broken(target.upstream, error)

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
