"""Bursts are let in a few at a time, first come first served."""

from __future__ import annotations

import asyncio
import socket

from loraplex.server.pacing import PacedListener, Pacer


def test_a_few_pass_in_each_turn_of_the_loop_in_order() -> None:
    async def go() -> list[list[int]]:
        pacer, turns = Pacer(per_turn=3), [[]]
        done = asyncio.Event()

        async def caller(number: int) -> None:
            await pacer.turn()
            turns[-1].append(number)
            if number == 9:
                done.set()

        tasks = [asyncio.create_task(caller(number)) for number in range(10)]
        while not done.is_set():
            await asyncio.sleep(0)
            turns.append([])
        await asyncio.gather(*tasks)
        return [turn for turn in turns if turn]

    turns = asyncio.run(go())
    assert [number for turn in turns for number in turn] == list(range(10))
    assert max(map(len, turns)) <= 3


def test_a_single_caller_never_waits() -> None:
    async def go() -> None:
        pacer = Pacer(per_turn=1)
        for _ in range(3):
            passing = pacer.turn()
            try:
                passing.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("it waited")
            await asyncio.sleep(0)  # the next turn of the loop
            await asyncio.sleep(0)

    asyncio.run(go())


def test_callers_that_gave_up_take_nobodys_turn() -> None:
    async def go() -> list[int]:
        pacer, passed = Pacer(per_turn=1), []

        async def caller(number: int) -> None:
            await pacer.turn()
            passed.append(number)

        tasks = [asyncio.create_task(caller(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return passed

    assert asyncio.run(go()) == [0, 2, 3]


def test_a_listener_accepts_bursts_and_ends() -> None:
    class Greeter(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"hi")
            transport.close()

    async def go() -> int:
        loop = asyncio.get_running_loop()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.setblocking(False)
            listener.listen(100)
            clients = [socket.create_connection(listener.getsockname()) for _ in range(50)]
            server = PacedListener(listener, Greeter)
            for client in clients:
                client.setblocking(False)
            greetings = [await loop.sock_recv(client, 2) for client in clients]
            server.close()
            await server.wait_closed()
            for client in clients:
                client.close()
        return sum(greeting == b"hi" for greeting in greetings)

    assert asyncio.run(go()) == 50
