"""A way to a server that can be cut."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.cuttable import Cuttable


def test_it_passes_everything_on_until_it_is_cut() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data.upper())
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        way = Cuttable(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        port = int((await way.start()).rpartition(":")[2])
        for _ in range(2):  # a new connection may come after a cut
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"HELLO"
            way.cut()
            with pytest.raises(ConnectionError):
                await reader.readexactly(1)
            writer.close()
        await way.close()
        server.close()

    asyncio.run(scenario())
