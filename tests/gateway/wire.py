"""A Unix socket in front of PostgreSQL's, to take the database away from a gateway and give it back."""

import asyncio
import contextlib
import os
import urllib.parse


class Wire:
    """Cut it, and to the gateway the database is gone; hold it, and the database answers nothing more."""

    def __init__(self, folder: str, database_url: str) -> None:
        base, _, place = database_url.partition("?host=")
        self.url = f"{base}?host={folder}"
        self._path = f"{folder}/.s.PGSQL.5432"
        self._real = urllib.parse.unquote(place) + "/.s.PGSQL.5432"
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.refusing: tuple[str, str] | None = None
        """SQLSTATE and words that a new connection is answered with, as the server does while it starts."""

    async def mend(self) -> None:
        self._flows.set()
        if self._server is None:
            self._server = await asyncio.start_unix_server(self._join, self._path)

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            os.unlink(self._path)  # noqa: PTH108
            for writer in self._open:
                writer.transport.abort()
            self._server = None

    def hold(self) -> None:
        """Let nothing through and end nothing, as a network does that drops packets."""
        self._flows.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing is not None:
            await reader.read(1000)
            state, words = self.refusing
            fields = f"SFATAL\0VFATAL\0C{state}\0M{words}\0\0".encode()
            writer.write(b"E" + (len(fields) + 4).to_bytes(4) + fields)
            writer.close()
            return
        back_reader, back_writer = await asyncio.open_unix_connection(self._real)
        pair = {writer, back_writer}
        self._open |= pair
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(self._pump(reader, back_writer), self._pump(back_reader, writer))
        self._open -= pair

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        writer.close()
