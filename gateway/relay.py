"""From the upstream's answer to the caller's socket: what is forwarded, what is hidden, what counts as delivered.

The row is written before the answer's end is sent: the caller never holds a complete answer that has no row. After the
caller has left, the rest of the upstream's stream is still read, for the account at its end.
"""

import time
from collections.abc import Awaitable, Callable

import msgspec

from engine.protocol import ErrorBody, ErrorDetail
from gateway.api.chat import ChatWriter, without_account
from gateway.call import Call
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.operation import Attempt, Operation, Priced
from gateway.upstreams.frames import DONE, ChatDecoder, Frame, MalformedError
from gateway.upstreams.sse import EventTooLargeError, events
from gateway.upstreams.transport import BrokenError, Reply

Record = Callable[[], Awaitable[list[Priced]]]
"""Settles the operation and writes its row, once."""

STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


async def relay_whole(
    operation: Operation, exchange: Exchange, reply: Reply, headers: dict[str, str], record: Record
) -> None:
    """Raises ApiError 502 when the upstream's answer does not come whole."""
    attempt = operation.attempts[-1]
    try:
        frame = ChatDecoder().whole(await reply.read())
    except (BrokenError, MalformedError) as error:
        attempt.end("upstream_error", str(error))
        text = f"The upstream {attempt.upstream} failed before its answer was complete: {error}."
        raise ApiError(502, "upstream_error", text, outcome="upstream_error") from error
    attempt.saw(frame)
    operation.finish_reason = frame.finish_reason
    if exchange.gone:
        return
    attempt.delivered = frame.usage
    attempt.delivered_characters = frame.characters
    attempt.end("ok")
    priced = (await record())[-1]
    headers["x-farthing-cached-tokens"] = str(priced.tokens.input_cached)
    if priced.billed is not None:
        headers["x-farthing-cost"] = f"{priced.billed:f}"
    await exchange.respond(200, headers, without_account(frame))


class StreamRelay:
    """One stream's way to the caller. Frames that end a choice wait for the row, as do the usage chunk and [DONE]."""

    def __init__(self, operation: Operation, call: Call, exchange: Exchange, record: Record) -> None:
        self._operation = operation
        self._attempt: Attempt = operation.attempts[-1]
        self._call = call
        self._exchange = exchange
        self._record = record
        self._held: list[Frame] = []
        self._usage_frame: Frame | None = None
        self._writer = ChatWriter(call)

    async def run(self, reply: Reply, headers: dict[str, str]) -> None:
        await self._exchange.start(200, {**STREAM_HEADERS, **headers})
        failure = await self._relay(reply)
        if self._exchange.gone:
            return
        if failure is None:
            self._attempt.end("ok")
            await self._record()
            await self._finish()
        else:
            self._attempt.end("upstream_error", failure)
            self._operation.end("upstream_error", 200, failure)
            await self._record()
            await self._exchange.write(_error_frame(self._attempt.upstream, failure) + DONE, last=True)

    async def _relay(self, reply: Reply) -> str | None:
        """Forward frames until the stream ends; None when it ended well, else what went wrong."""
        try:
            async for data in events(reply.chunks()):
                if data == b"[DONE]":
                    return None
                frame = ChatDecoder().whole(data)
                if frame.error is not None:
                    return frame.error
                await self._take(frame)
        except EventTooLargeError:
            return "it sent an event that is too large"
        except (BrokenError, MalformedError) as error:
            return str(error)
        return None if self._held else "its stream ended in the middle of the answer"

    async def _take(self, frame: Frame) -> None:
        self._attempt.saw(frame)
        if frame.finish_reason is not None:
            self._operation.finish_reason = frame.finish_reason
            self._held.append(frame)
        elif frame.usage is not None and not frame.has_choices:
            self._usage_frame = frame
        else:
            held, self._held = self._held, []  # another choice goes on
            for earlier in [*held, frame]:
                await self._send(earlier)

    async def _send(self, frame: Frame) -> None:
        if self._exchange.gone:
            return
        await self._exchange.write(self._bytes(frame))
        if self._exchange.gone:  # it left while we waited for its socket
            return
        self._attempt.delivered = frame.usage or self._attempt.delivered
        self._attempt.delivered_characters += frame.characters
        if frame.characters and self._attempt.first_token is None:
            self._attempt.first_token = time.monotonic()

    async def _finish(self) -> None:
        held = [*self._held, self._usage_frame] if self._usage_frame else self._held
        await self._exchange.write(self._writer.finish(held, None), last=True)

    def _bytes(self, frame: Frame) -> bytes:
        return self._writer.write(frame)


def _error_frame(upstream: str, failure: str) -> bytes:
    text = f"The upstream {upstream} failed in the middle of the answer: {failure}."
    error = ErrorBody(ErrorDetail(text, "server_error", None, "upstream_error"))
    return b"data: " + msgspec.json.encode(error) + b"\n\n"
