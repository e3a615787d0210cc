"""A TCP proxy on loopback that forwards connections to a server until they are cut."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

_CHUNK_BYTES: Final = 1 << 16
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER value with which closing the socket resets the connection."""


class Cuttable:
    """Forwards connections to the server at `url`; `start` returns the address to use instead."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Reset all connections. New ones are accepted at once."""
        for writer in self._writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = self._target
        there_reader, there_writer = await asyncio.open_connection(target.hostname, target.port)
        both = {writer, there_writer}
        self._writers |= both
        try:
            await asyncio.gather(_pass_on(reader, there_writer), _pass_on(there_reader, writer))
        finally:
            self._writers -= both
            for each in both:
                each.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
