"""An engine process that falls silent: stopped, it neither ends nor answers."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator

import fake_core
import pytest
from engine_client_harness import client_of, pid_of, run, running, tokens, until, wait_for_state
from fake_core import request_of, tokens_of

from loraplex.core.errors import EngineDeadError
from loraplex.core.request import EngineOutput
from loraplex.server.engine_status import EngineState
from loraplex.server.heartbeat import BEAT_S, Signs, Silence


def test_a_stopped_engine_lets_nobody_wait_and_is_back_when_it_goes_on() -> None:
    async def scenario() -> None:
        async with running(silent_s=2 * BEAT_S, lost_s=1e9) as client:
            streams = [client.generate(request_of(f"r{i}", fake_core.ENDLESS)) for i in range(3)]
            for stream in streams:
                await anext(stream)
            pid = pid_of(client)
            os.kill(pid, signal.SIGSTOP)
            for stream in streams:
                with pytest.raises(
                    EngineDeadError, match=r"has given no sign of life for .* send the request again"
                ):
                    await _exhaust(stream)
            assert not client.healthy
            assert client.status.state is EngineState.SILENT
            assert "it is restarted if it does not answer soon" in client.status.explain()

            os.kill(pid, signal.SIGCONT)
            # Under the name of a request that was taken from it: it must have none of the old one's tokens.
            request = request_of("r0")
            assert await tokens(client, request) == tokens_of(request)
            assert (pid_of(client), client.status.num_restarts) == (pid, 0)
            assert (await client.stats()).num_running == 0

    run(scenario())


def test_an_answer_of_before_the_silence_does_not_end_it() -> None:
    async def scenario() -> None:
        async with running(silent_s=2 * BEAT_S, lost_s=1e9) as client:
            stream = client.generate(request_of("r", fake_core.ENDLESS))
            await anext(stream)
            pid = pid_of(client)
            os.kill(pid, signal.SIGSTOP)
            # Asked before anything is taken from it, so that it answers this first.
            assert client._child is not None
            client._ask_stats(client._child)
            await wait_for_state(client, EngineState.SILENT)
            with pytest.raises(EngineDeadError):
                await _exhaust(stream)
            os.kill(pid, signal.SIGCONT)
            await wait_for_state(client, EngineState.READY)
            assert client._num_answered == client._num_asked
            assert (await client.stats()).num_running == 0

    run(scenario())


def test_an_engine_that_stays_silent_is_replaced() -> None:
    async def scenario() -> None:
        async with running(silent_s=BEAT_S, lost_s=3 * BEAT_S) as client:
            pid = pid_of(client)
            os.kill(pid, signal.SIGSTOP)
            await wait_for_state(client, EngineState.SILENT)
            request = request_of("r")
            assert await tokens(client, request) == tokens_of(request)
            assert client.status.num_restarts == 1
            assert pid_of(client) != pid
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(scenario())


def test_a_silent_engine_is_closed_like_any_other() -> None:
    async def scenario() -> None:
        client = client_of(silent_s=BEAT_S, lost_s=1e9, stop_grace_s=0.1)
        await client.start()
        pid = pid_of(client)
        os.kill(pid, signal.SIGSTOP)
        await wait_for_state(client, EngineState.SILENT)
        await client.close()

        async def is_gone() -> bool:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            return False

        await until(is_gone)

    run(scenario())


def test_silence_counts_only_while_somebody_listens() -> None:
    silence = Silence(silent_s=3 * BEAT_S, lost_s=5 * BEAT_S)
    assert silence.look(7) is Signs.ALIVE
    seen = [silence.look(7) for _ in range(6)]
    assert seen == [Signs.ALIVE, Signs.ALIVE, Signs.SILENT, Signs.SILENT, Signs.LOST, Signs.LOST]
    assert silence.look(8) is Signs.ALIVE
    assert silence.seconds == 0.0


async def _exhaust(stream: AsyncIterator[EngineOutput]) -> None:
    async for _ in stream:
        pass
