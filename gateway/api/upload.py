"""One file on its way from a multipart body into the database, in chunks: never in memory as a whole."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from uuid import UUID

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.people import Principal
from gateway.api.callers import bad
from gateway.batches.files import (
    CHUNK_BYTES,
    KEEP_SECONDS,
    ChunkWriter,
    StoredFile,
    abandon_file,
    add_chunk,
    begin_file,
    finish_file,
)
from gateway.call import storable
from gateway.database import transaction
from gateway.errors import ApiError
from gateway.exchange import DISCARD_FACTOR

LEAST_SECONDS = 3600
MAX_PARTS = 8
MAX_FIELD_BYTES = 1024
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FIELDS = ("purpose", ANCHOR, SECONDS)


class Upload:
    """Use it once. What is stored before an error is removed by `abandon`."""

    def __init__(self, engine: AsyncEngine, principal: Principal, limit: int) -> None:
        self._engine = engine
        self._principal = principal
        self._limit = limit
        self._fields: dict[str, str] = {}
        self._name = ""
        self._value = bytearray()
        self._file: UUID | None = None
        self._writer = ChunkWriter(self._store)

    async def receive(self, chunks: AsyncIterator[bytes], content_type: str) -> StoredFile:
        """Raises ApiError 400 or 413, when the rest of the body is read: who is still sending would not see why."""
        try:
            return await self._receive(chunks, content_type)
        except ApiError:
            with contextlib.suppress(ApiError):
                await self._drop(chunks)
            raise

    async def abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(ApiError):  # the database is away: it will be removed by its age
                async with transaction(self._engine) as conn:
                    await abandon_file(conn, self._file)

    async def _drop(self, chunks: AsyncIterator[bytes]) -> None:
        dropped = 0
        async for chunk in chunks:
            dropped += len(chunk)
            if dropped > self._limit * DISCARD_FACTOR:
                return

    async def _receive(self, chunks: AsyncIterator[bytes], content_type: str) -> StoredFile:
        kind, options = parse_options_header(content_type)
        if kind != "multipart/form-data" or not options.get("boundary"):
            raise bad("invalid_content_type", "Send the file as multipart/form-data, with a boundary.", None)
        try:
            with PushMultipartParser(options["boundary"], max_segment_count=MAX_PARTS) as parser:
                async for chunk in chunks:
                    for event in parser.parse(chunk):
                        await self._take(event)
        except MultipartError as error:
            raise bad("invalid_multipart", f"The body is not valid multipart/form-data: {error}.", None) from None
        return await self._finish()

    async def _take(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        if isinstance(event, MultipartSegment):
            await self._begin(event.name or "", event.filename)
        elif event is None:
            self._end()
        elif self._name == "file":
            if self._writer.bytes + len(event) > self._limit:
                text = f"The file is larger than the limit of {self._limit} bytes. Split it, or ask the operator."
                raise ApiError(413, "file_too_large", text, param="file")
            await self._writer.write(event)
        else:
            self._value += event
            if len(self._value) > MAX_FIELD_BYTES:
                raise bad("invalid_value", f"`{self._name}` is too long.", self._name)

    async def _begin(self, name: str, filename: str | None) -> None:
        if name not in (*FIELDS, "file"):
            text = f"There is no field `{name[:100]}` here, only file, {', '.join(FIELDS)}."
            raise bad("unknown_parameter", text, name[:100])
        if name in self._fields or (name == "file" and self._file is not None):
            raise bad("invalid_value", f"`{name}` was sent twice.", name)
        self._name = name
        if name != "file":
            self._value.clear()
            return
        if filename is None:
            raise bad("invalid_value", "`file` must be sent as a file, with a file name.", "file")
        principal = self._principal
        async with transaction(self._engine) as conn:
            self._file = await begin_file(conn, principal.org_id, principal.key_id, "batch", storable(filename))

    def _end(self) -> None:
        if self._name == "file":
            return
        value = self._fields[self._name] = self._value.decode(errors="replace")
        if self._name == "purpose" and value != "batch":
            text = f"`purpose` {value[:40]!r} is not supported; the only one is `batch`: input files of /v1/batches."
            raise bad("unsupported_purpose", text, "purpose")

    async def _finish(self) -> StoredFile:
        for name, there in (("purpose", "purpose" in self._fields), ("file", self._file is not None)):
            if not there:
                raise bad("missing_required_parameter", f"`{name}` is required.", name)
        assert self._file is not None
        keep = keep_seconds(self._fields.get(ANCHOR), self._fields.get(SECONDS), "expires_after")
        size = await self._writer.close()
        async with transaction(self._engine) as conn:
            return await finish_file(conn, self._file, size, keep)

    async def _store(self, number: int, data: bytes) -> None:
        assert self._file is not None
        async with transaction(self._engine) as conn:
            await add_chunk(conn, self._file, number, data)


def keep_seconds(anchor: str | None, seconds: str | int | None, param: str) -> int:
    """How long a file is kept by OpenAI's expiration policy. Raises ApiError 400 naming what is wrong with it."""
    if anchor is None and seconds is None:
        return KEEP_SECONDS
    if anchor != "created_at":
        raise bad("invalid_value", f"`{param}.anchor` must be `created_at`.", f"{param}.anchor")
    text = str(seconds)
    if not text.isascii() or not text.isdecimal() or not LEAST_SECONDS <= int(text[:9]) <= KEEP_SECONDS:
        range_ = f"from {LEAST_SECONDS} (an hour) to {KEEP_SECONDS} (30 days)"
        raise bad("invalid_value", f"`{param}.seconds` must be a whole number {range_}.", f"{param}.seconds")
    return int(text)


async def paced(chunks: AsyncIterator[bytes], seconds: float) -> AsyncIterator[bytes]:
    """`chunks`, of which every MiB has so long to come: a slow sender is waited for, but not for ever."""
    clock = asyncio.get_running_loop().time
    deadline, come = clock() + seconds, 0
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                chunk = await anext(chunks, None)
        except TimeoutError:
            text = f"The upload was too slow: a part of 1 MiB did not come within {seconds:g} seconds."
            raise ApiError(408, "request_timeout", text, headers={"connection": "close"}) from None
        if chunk is None:
            return
        come += len(chunk)
        if come >= CHUNK_BYTES:
            deadline, come = clock() + seconds, 0
        if chunk:
            yield chunk
