from __future__ import annotations

import asyncio

import pytest

from loraplex.core.request import EngineOutput, FinishReason, TokenLogprob
from loraplex.engine.output_stream import OutputStream, merge_outputs

LOGPROB = TokenLogprob(token_id=1, logprob=-0.1)


def output(*token_ids: int, reason: FinishReason | None = None) -> EngineOutput:
    return EngineOutput(request_id="a", token_ids=token_ids, finish_reason=reason)


def test_what_came_since_the_last_take_is_one_output() -> None:
    async def scenario() -> None:
        stream = OutputStream()
        stream.push(output(1))
        assert (await stream.take()).token_ids == (1,)
        for token_id in (2, 3, 4):
            stream.push(output(token_id))
        stream.push(output(reason=FinishReason.STOP))
        merged = await stream.take()
        assert merged.token_ids == (2, 3, 4)
        assert merged.finish_reason is FinishReason.STOP

    asyncio.run(scenario())


def test_pushes_wake_a_waiting_consumer_once() -> None:
    async def scenario() -> None:
        stream = OutputStream()
        waiting = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)  # lets the task run up to its wait
        for token_id in (1, 2, 3):
            stream.push(output(token_id))
        assert (await waiting).token_ids == (1, 2, 3)

    asyncio.run(scenario())


def test_a_failure_comes_after_what_was_pushed_before_it() -> None:
    async def scenario() -> None:
        stream = OutputStream()
        stream.push(output(1))
        stream.fail(KeyError("gone"))
        assert (await stream.take()).token_ids == (1,)
        for _ in range(2):
            with pytest.raises(KeyError):
                await stream.take()

    asyncio.run(scenario())


def test_a_cancelled_take_loses_nothing() -> None:
    async def scenario() -> None:
        stream = OutputStream()
        waiting = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        waiting.cancel()
        stream.push(output(1))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await stream.take()).token_ids == (1,)

    asyncio.run(scenario())


def test_merging_keeps_every_field() -> None:
    first = EngineOutput(
        request_id="a", token_ids=(1,), logprobs=(LOGPROB,), prompt_logprobs=(None,), num_cached_tokens=16
    )
    last = EngineOutput(
        request_id="a",
        token_ids=(2,),
        logprobs=(LOGPROB,),
        finish_reason=FinishReason.STOP,
        stop_token_id=9,
        error="x",
        error_param="model",
        adapter_hit=True,
    )
    assert merge_outputs([first, last]) == EngineOutput(
        request_id="a",
        token_ids=(1, 2),
        logprobs=(LOGPROB, LOGPROB),
        prompt_logprobs=(None,),
        num_cached_tokens=16,
        finish_reason=FinishReason.STOP,
        stop_token_id=9,
        error="x",
        error_param="model",
        adapter_hit=True,
    )
