"""From a decided call to an upstream's answer: which upstream, how often to try, what its refusals mean to the caller.

Only what is safe is tried again, and only before a byte has gone to the caller:

- A refused connection, and an engine's 503 while it loads, cost nothing: another upstream at once, else again with
  back-off for as long as the upstream's window. They are no attempts.
- A 408, 500, 502, 503, 504 or 529, a connection that broke without an answer, and a 200 without one (an empty object,
  an error, a stream that ends or fails at once) are attempts that failed: at most `retries` more, on another upstream
  where there is one. A broken connection once more only: the request may be what broke it.
- A 429, and a key that is refused: another upstream, or a fallback.
- Silence is not tried again, because the answer may still be computed there; a fallback may answer.

A Retry-After is waited for, within the window. When a model's upstreams cannot answer, its fallbacks are asked in turn.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping

from gateway.api.count_tokens import uncountable
from gateway.attempts import Asking, Opened
from gateway.call import Call
from gateway.errors import ApiError, unavailable
from gateway.failures import BUSY_RETRY_SECONDS, NoAnswerError, away, broken, of_reply
from gateway.hedge import first_answer
from gateway.live import Live
from gateway.operation import Operation
from gateway.upstreams.answer import Answer
from gateway.upstreams.frames import MalformedError
from gateway.upstreams.pool import Pool
from gateway.upstreams.target import Target
from gateway.upstreams.transport import BrokenError, UnreachableError
from gateway.upstreams.upstream import PromptSize, can_tokenize, engine_prompt_size, prompt_upper_bound

FIRST_DELAY = 0.1
LONGEST_DELAY = 2.0
MAX_BROKEN = 2
BEGIN_SHARE = 1 / 3
"""Of the longest silence that a caller should see: so long a stream's first frame is awaited."""


class Patience:
    """Back-off within a window: 0.1 s, then twice as long each time up to 2 s."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._delay = FIRST_DELAY

    async def wait(self, at_least: float = 0.0) -> bool:
        """Sleep before the next try, `at_least` seconds; False when the window is over or ends before that."""
        left = self._deadline - time.monotonic()
        if left <= 0 or at_least > left:
            return False
        await asyncio.sleep(min(max(self._delay, at_least), left))
        self._delay = min(self._delay * 2, LONGEST_DELAY)
        return True


class Dispatcher:
    def __init__(self, live: Live) -> None:
        self._live = live

    async def prompt_size(self, call: Call, model: str) -> PromptSize:
        """The most that any upstream that may answer counts: an engine's tokenizer is asked, others are bounded.

        Raises ApiError.
        """
        pools = self._chain(model)
        if len(pools) == 1 and not pools[0].has_engine:
            _refuse_media(call, model)
            settings = pools[0].settings
            bound = prompt_upper_bound(call, settings.context)
            return PromptSize(bound.tokens, bound.room, settings.max_output)
        engines = [pool for pool in pools if pool.has_engine]
        sizes = [await _tokenized(call, pool) for pool in engines] if engines and can_tokenize(call) else []
        if not sizes or not all(pool.is_engines for pool in pools):
            _refuse_media(call, model)
            contexts = [pool.settings.context for pool in pools if pool not in engines or len(pool.targets) > 1]
            sizes += [prompt_upper_bound(call, context) for context in contexts or [pools[0].settings.context]]
        room = _largest(size.room for size in sizes)
        most = _largest(pool.settings.max_output for pool in pools)
        return PromptSize(max(size.tokens for size in sizes), room, most)

    async def count_tokens(self, call: Call, model: str) -> int:
        """The exact length of a prompt. Raises ApiError, 501 where no upstream of the model can count."""
        pool = self._chain(model)[0]
        if pool.has_engine and can_tokenize(call):
            call.leave_unsaid(pool.settings.drop_params)
            return (await _tokenized(call, pool)).tokens
        for target in pool.targets:
            try:
                count = await target.upstream.counted(call, target.name)
            except (UnreachableError, BrokenError, MalformedError) as error:
                raise broken(target.upstream, error).error from error
            if count is not None:
                return count
        raise uncountable(model)

    async def open(
        self, operation: Operation, call: Call, model: str, max_output: int | None, trace: Mapping[str, str]
    ) -> Answer:
        """An answer that has begun, a whole one with all of it; its attempt is `operation.attempts[-1]`.

        Whoever gets one gives it back with `close`. Raises ApiError.
        """
        first: NoAnswerError | None = None
        begin_seconds = self._live.settings.limits.keep_alive_seconds * BEGIN_SHARE
        for pool in self._chain(model):
            try:
                opened = await _open(Asking(operation, call, pool, max_output, trace, begin_seconds))
            except NoAnswerError as failure:
                if not failure.falls_back:
                    raise failure.error from failure
                first = first or failure
            else:
                return opened.answer
        assert first is not None
        raise first.error from first

    async def close(self, operation: Operation, answer: Answer) -> None:
        """Give back an answer's connection and its place at the upstream, whatever became of it. Once each."""
        flight = operation.flight
        assert flight is not None, "an answer is in flight until it is closed"
        flight.target.leave()
        if operation.attempts[-1].status == "upstream_error":
            flight.target.failed()
        operation.flight = None
        await answer.reply.close()

    def _chain(self, model: str) -> list[Pool]:
        """The model's pool, then those of its fallbacks. Raises ApiError when a reload has taken the model away."""
        pools = self._live.pools
        pool = pools.get(model)
        if pool is None:
            raise ApiError(404, "model_not_found", f"The model {model!r} is no longer configured.", param="model")
        return [pool] if not pool.settings.fallbacks else [pool, *(pools[name] for name in pool.settings.fallbacks)]


def _refuse_media(call: Call, model: str) -> None:
    if call.has_media():
        text = f"{model!r} cannot be used with media under a hard budget: their tokens cannot be bounded."
        raise ApiError(400, "unbounded_prompt", text, param="messages", outcome="refused")


def _largest(counts: Iterable[int | None]) -> int | None:
    """None where one of them is not known."""
    largest = 0
    for count in counts:
        if count is None:
            return None
        largest = max(largest, count)
    return largest


async def _open(asking: Asking) -> Opened:
    """An answer of one of the pool's upstreams. Raises NoAnswerError when none gives one."""
    pool = asking.pool
    patience = Patience(pool.window)
    retries, times_broken = pool.settings.retries, 0
    tried: set[Target] = set()  # since the last wait
    hopeless: set[Target] = set()  # would fail in the same way again
    failure: NoAnswerError | None = None
    while True:
        target = await asking.choose(tried | hopeless)
        if target is None:
            failure = failure or _cannot(pool)
            may_change = tried or any(target.is_away for target in pool.targets)
            is_over = failure.again == "never" or len(hopeless) == len(pool.targets) or not may_change
            if is_over or not await patience.wait(failure.retry_after):
                raise failure
            tried.clear()
            continue
        try:
            return await _ask(asking, target, tried | hopeless)
        except NoAnswerError as reason:
            failure = reason
        (hopeless if failure.again == "elsewhere" else tried).add(target)
        if failure.broken:
            times_broken += 1
            # It may have waited there for long: a restart has its whole window from now on.
            patience = Patience(pool.window)
        retries -= failure.counts
        if failure.again == "never" or retries < 0 or times_broken == MAX_BROKEN:
            raise failure


async def _ask(asking: Asking, target: Target, tried: set[Target]) -> Opened:
    after = asking.pool.settings.hedge_after_seconds
    if after is None:
        return await asking.finish(asking.start(target))
    return await first_answer(asking, target, after, lambda: asking.choose({*tried, target}))


def _cannot(pool: Pool) -> NoAnswerError:
    """Why no upstream takes a request that has not been tried anywhere."""
    if any(target.is_away for target in pool.targets):
        return away(pool.targets[0].upstream)
    if all(target.is_full for target in pool.targets):
        text = f"All upstreams of {pool.model!r} have as many requests as they may be given."
        return NoAnswerError(unavailable(text, retry_after=BUSY_RETRY_SECONDS), "never")
    now = time.monotonic()
    seconds = min(target.breaker.ready_in(now) for target in pool.targets)
    names = " and ".join(target.upstream.name for target in pool.targets)
    text = f"The upstream {names} has failed too often and is left alone for a moment."
    return NoAnswerError(unavailable(text, retry_after=max(1, round(seconds))), "never")


async def _tokenized(call: Call, pool: Pool) -> PromptSize:
    """Counted by one of the pool's engines, whichever answers first. Raises ApiError."""
    engines = [target for target in pool.targets if target.upstream.is_engine]
    patience = Patience(pool.window)
    while True:
        for target in engines:
            upstream = target.upstream
            try:
                reply = await upstream.tokenize(call, target.name)
                try:
                    body = await reply.read()
                finally:
                    await reply.close()
            except UnreachableError:
                failure = away(upstream)
            except BrokenError as error:
                failure = broken(upstream, error)
            else:
                if reply.status == 200:
                    return engine_prompt_size(body)
                failure = of_reply(upstream, reply.status, reply.headers, body)
                if reply.status != 503:
                    raise failure.error
        if not await patience.wait():
            raise failure.error
