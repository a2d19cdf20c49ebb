"""From a decided call to an upstream's answer: which upstream, how often to try, what its refusals mean to the caller.

Only what is safe is tried again, and only before a byte has gone to the caller: a refused connection and a 503 (the
engine restarts) with back-off within the upstream's window, a connection that broke without an answer once more, in a
window of its own.
"""

import asyncio
import time
from collections.abc import Mapping

from gateway.call import Call
from gateway.errors import ApiError, UpstreamReplyError, unavailable
from gateway.operation import Attempt, Operation
from gateway.settings import Settings
from gateway.upstreams.frames import error_message
from gateway.upstreams.transport import BrokenError, Reply, SilentError, UnreachableError
from gateway.upstreams.upstream import Flight, PromptSize, Upstream, engine_prompt_size, prompt_upper_bound

FIRST_DELAY = 0.1
LONGEST_DELAY = 2.0
MAX_BROKEN = 2
PASSED_THROUGH = frozenset({400, 404, 409, 413, 415, 422, 429})
"""Upstream answers that concern the caller's request; anything else concerns the operator and becomes a 502."""
PASSED_HEADERS = ("content-type", "retry-after", "x-should-retry")


class Patience:
    """Back-off within a window: 0.1 s, then twice as long each time up to 2 s."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._delay = FIRST_DELAY

    async def wait(self) -> bool:
        """Sleep before the next try; False when the window is over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        await asyncio.sleep(min(self._delay, left))
        self._delay = min(self._delay * 2, LONGEST_DELAY)
        return True


class Dispatcher:
    def __init__(self, settings: Settings, upstreams: Mapping[str, Upstream]) -> None:
        self._models = settings.models
        self._upstreams = upstreams

    def upstream_of(self, model: str) -> Upstream:
        return self._upstreams[self._models[model].upstream]

    async def prompt_size(self, call: Call, model: str) -> PromptSize:
        """Counted by the engine's own tokenizer, bounded from above elsewhere. Raises ApiError."""
        upstream = self.upstream_of(model)
        if not upstream.is_engine:
            if call.has_media():
                text = f"{model!r} cannot be used with media under a hard budget: their tokens cannot be bounded."
                raise ApiError(400, "unbounded_prompt", text, param="messages", outcome="refused")
            return prompt_upper_bound(call, self._models[model].context)
        patience = Patience(upstream.settings.connect_window_seconds)
        while True:
            try:
                reply = await upstream.tokenize(call, self._upstream_name(model))
                body = await _read(reply)
            except (UnreachableError, BrokenError) as error:
                if not await patience.wait():
                    raise _away(upstream) from error
                continue
            if reply.status == 200:
                return engine_prompt_size(body)
            if reply.status != 503 or not await patience.wait():
                raise _reply_error(upstream, reply, body)

    async def open(
        self, operation: Operation, call: Call, model: str, max_output: int | None, trace: Mapping[str, str]
    ) -> Reply:
        """A 200 answer whose headers are here; its attempt is `operation.attempts[-1]`. Raises ApiError."""
        upstream = self.upstream_of(model)
        body = upstream.body(call, self._upstream_name(model), max_output)
        patience = Patience(upstream.settings.connect_window_seconds)
        assert operation.principal is not None
        broken = 0
        while True:
            attempt = Attempt(len(operation.attempts) + 1, upstream.name, model, upstream.is_engine)
            operation.attempts.append(attempt)
            operation.flight = Flight(upstream, f"{operation.id}.{attempt.number}")
            try:
                reply = await upstream.chat(body, operation.flight.request_id, operation.principal.org_id, trace)
            except UnreachableError as error:
                operation.attempts.pop()
                operation.flight = None
                if not await patience.wait():
                    raise _away(upstream) from error
                continue
            except SilentError as error:
                attempt.end("upstream_error", str(error))
                raise _failed(504, f"The upstream {upstream.name} did not answer in time.") from error
            except BrokenError as error:
                attempt.end("upstream_error", str(error))
                broken += 1
                # It may have waited there for long: a restart has its whole window from now on.
                patience = Patience(upstream.settings.connect_window_seconds)
                if broken == MAX_BROKEN or not await patience.wait():
                    raise _failed(502, f"The upstream {upstream.name} closed the connection: {error}.") from error
                continue
            attempt.http_status = reply.status
            if reply.status == 200:
                return reply
            attempt.refused = True
            failure = _reply_error(upstream, reply, await _read_error(reply))
            if reply.status == 503 and upstream.is_engine:  # it loads its models: as good as unreachable
                operation.attempts.pop()
                operation.flight = None
                if not await patience.wait():
                    raise failure
                continue
            attempt.end(failure.outcome, failure.message)
            if reply.status != 503 or not await patience.wait():
                raise failure

    def _upstream_name(self, model: str) -> str:
        return self._models[model].upstream_model or model


async def _read(reply: Reply) -> bytes:
    try:
        return await reply.read()
    finally:
        await reply.close()


async def _read_error(reply: Reply) -> bytes:
    try:
        return await _read(reply)
    except BrokenError:
        return b""


def _reply_error(upstream: Upstream, reply: Reply, body: bytes) -> ApiError:
    message = error_message(body)
    if reply.status in PASSED_THROUGH and body:
        headers = {name: reply.headers[name] for name in PASSED_HEADERS if name in reply.headers}
        return UpstreamReplyError(reply.status, body, message, headers)
    if reply.status == 503:
        return unavailable(f"The upstream {upstream.name} is not ready.")
    return _failed(502, f"The upstream {upstream.name} answered {reply.status}.")


def _away(upstream: Upstream) -> ApiError:
    return unavailable(f"The upstream {upstream.name} cannot be reached.")


def _failed(status: int, message: str) -> ApiError:
    return ApiError(status, "upstream_error", message, outcome="upstream_error")
