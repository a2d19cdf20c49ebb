"""A batch's input file, read to its end before a line of it runs: its lines, or everything that is wrong with them."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from gateway.batches.lines import Line, LineError, read_line

MAX_LINES = 50_000
MAX_ERRORS = 100


@dataclass(slots=True)
class Input:
    """`errors`: as in OpenAI's `errors.data`. A file with one error runs not at all."""

    lines: list[Line] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def model(self) -> str | None:
        """The model of all lines; None where they name different ones."""
        models = {line.model for line in self.lines}
        return models.pop() if len(models) == 1 else None

    def refuse(self, error: LineError, number: int | None) -> None:
        self.errors.append({"code": error.code, "message": error.message, "param": error.param, "line": number})


async def read_input(chunks: AsyncIterator[bytes], endpoint: str, line_bytes: int) -> Input:
    """Stops after MAX_ERRORS, MAX_LINES, or a line of more than `line_bytes`; empty lines are no requests."""
    found = Input()
    seen: dict[str, int] = {}
    number = 0
    try:
        async for number, position, raw in numbered_lines(chunks, line_bytes):
            if not raw.strip():
                continue
            if len(found.lines) == MAX_LINES:
                raise LineError("too_many_requests", f"A batch has at most {MAX_LINES} requests: split the file.")
            try:
                line = read_line(raw, number, position, endpoint)
                if (first := seen.setdefault(line.custom_id, number)) != number:
                    text = f"this `custom_id` is the one of line {first}: give each line its own."
                    raise LineError("duplicate_custom_id", text, "custom_id")
                found.lines.append(line)
            except LineError as error:
                found.refuse(error, number)
                if len(found.errors) == MAX_ERRORS:
                    raise LineError("too_many_errors", f"Only the first {MAX_ERRORS} errors are listed.") from error
    except LineError as error:
        found.refuse(error, None)
    except _LineTooLongError:
        text = f"a line may have {line_bytes} bytes, as much as a request; the rest of the file was not read."
        found.refuse(LineError("line_too_long", text), number + 1)
    if not found.lines and not found.errors:
        found.refuse(LineError("empty_file", "The file has no request in it."), None)
    return found


class _LineTooLongError(Exception):
    pass


async def numbered_lines(chunks: AsyncIterator[bytes], line_bytes: int) -> AsyncIterator[tuple[int, int, bytes]]:
    """(number from 1, position of its first byte, line without its end) of each line, however the bytes were cut."""
    pending = b""
    number = position = 0
    async for chunk in chunks:
        *lines, rest = chunk.split(b"\n")
        for part in lines:
            line = pending + part
            pending = b""
            if len(line) > line_bytes:
                raise _LineTooLongError
            number += 1
            yield number, position, line
            position += len(line) + 1
        pending += rest
        if len(pending) > line_bytes:
            raise _LineTooLongError
    if pending:
        yield number + 1, position, pending
