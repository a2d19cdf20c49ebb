"""From the upstream's answer to the caller's socket: what is forwarded, what is held, what counts as delivered.

The row is written before the answer's end is sent: the caller never holds a complete answer that has no row. After the
caller has left, the rest of the upstream's stream is still read, for the account at its end.
"""

import time
from math import inf

import msgspec

from gateway.api.surface import StreamWriter, Surface
from gateway.call import Call
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.operation import Attempt, Operation
from gateway.reply_headers import reply_headers
from gateway.rows import Rows
from gateway.settlement import settled_usage
from gateway.upstreams.answer import EMPTY, Answer
from gateway.upstreams.characters import CHARACTERS_PER_TOKEN
from gateway.upstreams.frames import Frame, MalformedError, fields_of
from gateway.upstreams.sse import EventTooLargeError
from gateway.upstreams.transport import BrokenError
from gateway.upstreams.usage import Usage

CUT = "the stream was cut: what was reserved for it is used up"
CUT_COMMENT = f": farthing: {CUT}\n\n".encode()
"""Comments are for who looks at the wire; every SDK skips them, and reads `length` as the reason."""
DOUBT = 2
"""Without reported usage an answer is cut only when its characters make so many times the tokens reserved: a tokenizer
whose tokens are long must not cost a caller the answer it paid for."""
UNREADABLE = (MalformedError, msgspec.MsgspecError, RecursionError)
"""What a surface raises that reads more of a frame than the gateway does."""


async def relay_whole(
    operation: Operation,
    call: Call,
    exchange: Exchange,
    surface: Surface,
    answer: Answer,
    found: dict[str, str],
    rows: Rows,
) -> None:
    """`found`: headers about the response cache.

    Raises ApiError 502 where the caller's dialect has no words for the answer, 504 where it took too long."""
    attempt, frame = operation.attempts[-1], answer.frame
    assert frame is not None, "a whole answer was read before"
    if attempt.overdue:
        raise overdue(attempt)
    try:
        body = surface.whole(call, frame)
    except UNREADABLE as error:
        attempt.end("upstream_error", str(error))
        text = f"The upstream {attempt.upstream} failed before its answer was complete: {error}."
        raise ApiError(502, "upstream_error", text, outcome="upstream_error") from error
    operation.finish_reason = frame.finish_reason
    if exchange.gone:
        return
    attempt.delivered = frame.usage
    attempt.delivered_characters = frame.characters
    attempt.end("ok")
    row = rows.settle(operation)
    # What follows happens while the disk writes.
    priced = row.priced[-1]
    headers = reply_headers(operation) | found
    headers["x-farthing-cached-tokens"] = str(priced.tokens.input_cached)
    if priced.billed is not None:
        headers["x-farthing-cost"] = f"{priced.billed:f}"
    await exchange.begin(200, headers, body)
    await row.written()
    await exchange.write(body, last=True)


def overdue(attempt: Attempt) -> ApiError:
    """The refusal of a whole answer that took too long; the caller pays nothing for it."""
    attempt.billable = False
    attempt.end("upstream_error", "it did not answer in time")
    text = f"The upstream {attempt.upstream} did not answer in time."
    return ApiError(504, "upstream_error", text, outcome="upstream_error")


class StreamRelay:
    """One stream's way to the caller. Frames that end a choice wait for the row, as do those with usage alone."""

    def __init__(self, operation: Operation, call: Call, exchange: Exchange, writer: StreamWriter, rows: Rows) -> None:
        self._operation = operation
        self._attempt: Attempt = operation.attempts[-1]
        self._call = call
        self._exchange = exchange
        self._writer = writer
        self._rows = rows
        self._ends: list[Frame] = []
        self._usages: list[Frame] = []
        self._out: list[bytes] = []
        self._out_usage: Usage | None = None
        self._out_unreported = 0
        self._out_characters = 0
        self._most_output = operation.reserved_output
        self._room = inf if self._most_output is None else self._most_output * CHARACTERS_PER_TOKEN * DOUBT
        """How many more characters the caller is sent of an answer whose upstream does not count."""
        self._answered = False
        """Whether any frame had a choice."""
        self._quoted = False
        """Whether what failed is told in the upstream's own words."""

    async def run(self, answer: Answer, found: dict[str, str]) -> None:
        await self._exchange.start_stream(reply_headers(self._operation) | found, self._writer)
        failure, end = await self._relay(answer), b""
        await self._flush()
        if self._exchange.gone:
            return
        if failure is None:
            try:
                end = self._writer.end([*self._ends, *self._usages])
            except UNREADABLE as error:
                failure = f"it sent something that is not an answer: {error}"
        if failure is None:
            self._attempt.end("ok")
            row = self._rows.settle(self._operation)
            end += self._writer.finish(settled_usage(row.priced[-1]))
            await row.written()
            await self._exchange.write(CUT_COMMENT + end if self._attempt.cut else end, last=True)
        else:
            noted = self._attempt.noted(failure) if self._quoted else failure
            self._attempt.end("upstream_error", noted)
            self._operation.end("upstream_error", 200, noted)
            await self._rows.settle(self._operation).written()
            text = f"The upstream {self._attempt.upstream} failed in the middle of the answer: {failure}."
            told = ApiError(502, "upstream_error", text)
            told.request_id = str(self._operation.id)
            await self._exchange.write(self._writer.fail(told), last=True)

    async def _relay(self, answer: Answer) -> str | None:
        """Forward frames until the stream ends; None when it ended well, else what went wrong."""
        try:
            while (piece := await answer.piece()) is not None:
                for frame in piece:
                    if frame.error is not None:
                        self._quoted = True
                        return frame.error
                    self._take(frame)
                    if self._attempt.cut:
                        return None
                if answer.decoder.ended:
                    return None if self._answered else EMPTY
                await self._flush()
        except (BrokenError, MalformedError, EventTooLargeError) as error:
            return str(error)
        except UNREADABLE as error:
            return f"it sent something that is not an answer: {error}"
        return None if self._ends else "its stream ended in the middle of the answer"

    def _take(self, frame: Frame) -> None:
        self._attempt.saw(frame)
        self._answered = self._answered or frame.has_choices
        if frame.finish_reason is not None:
            self._operation.finish_reason = frame.finish_reason
            self._ends.append(frame)
        elif not frame.has_choices and frame.usage is not None:
            self._usages.append(frame)
        else:
            if self._ends:  # another choice goes on
                ended, self._ends = self._ends, []
                for earlier in ended:
                    self._write(earlier)
            if self._is_over(frame):
                self._cut(frame)
            else:
                self._write(frame)

    def _write(self, frame: Frame) -> None:
        if self._exchange.gone:
            return
        if data := self._writer.write(frame):
            self._out.append(data)
        if frame.usage is not None:
            self._out_usage, self._out_unreported = frame.usage, 0
        else:
            self._out_unreported += frame.characters
        self._out_characters += frame.characters
        self._room -= frame.characters

    async def _flush(self) -> None:
        """Send what one piece of the upstream's stream had, at once; it counts as delivered when the socket took it."""
        if self._out and not self._exchange.gone:
            if (slot := self._operation.slot) is not None:
                slot.sent(self._attempt.delivered_characters + self._out_characters)
            await self._exchange.write(self._out[0] if len(self._out) == 1 else b"".join(self._out))
        self._out.clear()
        if self._exchange.gone:  # perhaps while we waited for its socket
            return
        attempt = self._attempt
        attempt.delivered = self._out_usage or attempt.delivered
        attempt.unreported_characters = self._out_unreported
        if self._out_characters:
            attempt.delivered_characters += self._out_characters
            self._out_characters = 0
            if attempt.first_token is None:
                attempt.first_token = time.monotonic()

    def _is_over(self, frame: Frame) -> bool:
        """Whether with this frame the answer has more tokens than were reserved: its upstream ignores max_tokens."""
        if frame.usage is not None and self._most_output is not None:
            return frame.usage.completion_tokens > self._most_output
        return frame.characters > self._room

    def _cut(self, frame: Frame) -> None:
        """End the answer here: what the caller has is what it pays, and the upstream's connection is closed."""
        self._attempt.cut = True
        self._operation.finish_reason = "length"
        self._operation.note(CUT)
        fields = fields_of(frame.raw)
        for name in ("usage", "farthing"):
            fields.pop(name, None)
        nothing: dict[str, object] = {"text": ""} if self._call.kind == "completion" else {"delta": {}}
        choices = [{"index": index, **nothing, "finish_reason": "length"} for index in range(self._call.choices)]
        raw = msgspec.json.encode({**fields, "choices": choices})
        self._ends = [Frame(raw, has_choices=True, finish_reason="length", plain=True)]
        self._usages = []
