from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loraplex.adapters.spec import AdapterSpec
from loraplex.core import errors
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.sampling import SamplingParams
from loraplex.core.stats import EngineStats
from loraplex.engine.async_local import LocalAsyncEngine

REJECT, RAISE, ENDLESS, SILENT = range(900_001, 900_005)


class GatedCore:
    """Counts up from the prompt's first token, one token a step; each step takes one of `permits`, if set."""

    def __init__(self) -> None:
        self.permits: threading.Semaphore | None = None
        self.threads: set[str] = set()
        self.running: dict[str, EngineRequest] = {}
        self.num_done: dict[str, int] = {}
        self.adapters: set[str] = set()
        self.removing: set[str] = set()
        self.overtaken: list[str] = []
        self.num_steps = 0
        self.closed = False

    def add_request(self, request: EngineRequest) -> None:
        self.threads.add(threading.current_thread().name)
        if request.prompt_token_ids[0] == REJECT:
            raise errors.InvalidRequestError("not liked", param="prompt")
        self.running[request.request_id] = request
        self.num_done[request.request_id] = 0

    def cancel(self, request_id: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.running.pop(request_id, None)

    def add_adapter(self, spec: AdapterSpec) -> None:
        if spec.version == "unwanted":
            raise errors.AdapterFormatError("rank must be positive", field="r")
        self.adapters.add(spec.version)
        if spec.version in self.removing:
            self.removing.remove(spec.version)
            self.overtaken.append(spec.version)

    def remove_adapter(self, version: str) -> None:
        if version not in self.adapters:
            raise errors.UnknownModelError(f"no adapter {version}")
        self.removing.add(version)

    num_required = 0

    def stage_adapter(self, version: str) -> None:
        pass

    def prepare(self) -> bool:
        return False

    def take_removed_adapters(self) -> list[str]:
        removed = sorted(self.removing - {request.adapter for request in self.running.values()})
        self.removing -= set(removed)
        self.adapters -= set(removed)
        overtaken, self.overtaken = self.overtaken, []
        return overtaken + removed

    def has_work(self) -> bool:
        return any(request.prompt_token_ids[0] != SILENT for request in self.running.values())

    def step(self) -> list[EngineOutput]:
        self.threads.add(threading.current_thread().name)
        if self.permits is not None:
            self.permits.acquire()
        self.num_steps += 1
        return [
            self._advance(request)
            for request in list(self.running.values())
            if request.prompt_token_ids[0] != SILENT
        ]

    def _advance(self, request: EngineRequest) -> EngineOutput:
        prompt, request_id = request.prompt_token_ids[0], request.request_id
        if prompt == RAISE:
            raise RuntimeError("the device fell off")
        num_done = self.num_done[request_id]
        self.num_done[request_id] += 1
        reason = None
        if num_done + 1 == request.params.max_tokens and prompt != ENDLESS:
            reason = FinishReason.LENGTH
            del self.running[request_id]
        return EngineOutput(request_id=request_id, token_ids=(prompt + num_done,), finish_reason=reason)

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.running), num_steps=self.num_steps)

    def close(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.closed = True


@contextmanager
def engine_of(core: GatedCore) -> Iterator[LocalAsyncEngine]:
    engine = LocalAsyncEngine(core)
    try:
        yield engine
    finally:
        permits, core.permits = core.permits, None
        if permits is not None:
            permits.release()
        engine.close()


def request_of(
    request_id: str, prompt: int = 5, max_tokens: int = 3, adapter: str | None = None
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[prompt],
        params=SamplingParams(max_tokens=max_tokens),
        adapter=adapter,
    )


def spec_of(version: str) -> AdapterSpec:
    return AdapterSpec(version=version, path=Path("/adapters") / version, modules=(), num_params=0)


async def tokens(engine: LocalAsyncEngine, request: EngineRequest) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.token_ids]


def test_many_requests_keep_their_order_and_the_core_its_thread() -> None:
    async def scenario(engine: LocalAsyncEngine) -> None:
        answers = await asyncio.gather(
            *(tokens(engine, request_of(f"r{i}", prompt=1000 * i, max_tokens=20)) for i in range(300))
        )
        assert answers == [list(range(1000 * i, 1000 * i + 20)) for i in range(300)]

    core = GatedCore()
    with engine_of(core) as engine:
        asyncio.run(scenario(engine))
    assert core.threads == {"engine"}
    assert core.closed


def test_one_event_loop_after_the_other_may_use_it() -> None:
    with engine_of(GatedCore()) as engine:
        for i in range(5):
            assert asyncio.run(tokens(engine, request_of("same-id", prompt=i))) == [i, i + 1, i + 2]


def test_two_event_loops_at_once_may_use_it() -> None:
    answers: dict[int, list[int]] = {}
    with engine_of(GatedCore()) as engine:

        def use(prompt: int) -> None:
            answers[prompt] = asyncio.run(tokens(engine, request_of(f"r{prompt}", prompt, max_tokens=50)))

        threads = [threading.Thread(target=use, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {1000 * i: list(range(1000 * i, 1000 * i + 50)) for i in range(4)}


def test_a_slow_consumer_gets_what_it_missed_in_one_piece() -> None:
    async def scenario(engine: LocalAsyncEngine, permits: threading.Semaphore) -> None:
        stream = engine.generate(request_of("a", max_tokens=200))
        first = await anext(stream)
        permits.release(199)
        while (await engine.stats()).num_running:
            pass  # stats are answered behind the outputs, so the last one is in the stream now
        rest = [output async for output in stream]
        assert len(rest) == 1
        assert list(first.token_ids + rest[0].token_ids) == list(range(5, 205))

    core = GatedCore()
    core.permits = threading.Semaphore(1)
    with engine_of(core) as engine:
        asyncio.run(scenario(engine, core.permits))


def test_closing_a_stream_cancels_the_request() -> None:
    async def scenario(engine: LocalAsyncEngine) -> None:
        stream = engine.generate(request_of("a", ENDLESS))
        await anext(stream)
        assert (await engine.stats()).num_running == 1
        await stream.aclose()
        assert (await engine.stats()).num_running == 0

    with engine_of(GatedCore()) as engine:
        asyncio.run(scenario(engine))


def test_a_loop_that_ends_cancels_what_it_left() -> None:
    async def abandon(engine: LocalAsyncEngine) -> None:
        await anext(engine.generate(request_of("a", ENDLESS)))

    with engine_of(GatedCore()) as engine:
        asyncio.run(abandon(engine))
        assert asyncio.run(engine.stats()).num_running == 0


def test_a_loop_closed_without_goodbye_does_not_keep_its_requests_running() -> None:
    core = GatedCore()
    with engine_of(core) as engine:
        loop = asyncio.new_event_loop()
        stream = engine.generate(request_of("a", ENDLESS))
        loop.run_until_complete(anext(stream))
        loop.close()

        async def idle() -> None:
            while (await engine.stats()).num_running:
                pass

        asyncio.run(idle())
        asyncio.run(stream.aclose())


def test_a_refusal_is_raised_and_hurts_nobody() -> None:
    async def scenario(engine: LocalAsyncEngine) -> None:
        with pytest.raises(errors.InvalidRequestError) as caught:
            await tokens(engine, request_of("a", REJECT))
        assert caught.value.param == "prompt"
        assert await tokens(engine, request_of("b")) == [5, 6, 7]

    with engine_of(GatedCore()) as engine:
        asyncio.run(scenario(engine))


@pytest.mark.parametrize("how", ["drained", "overtaken"])
def test_removing_an_adapter_waits_for_its_requests_unless_it_is_added_again(how: str) -> None:
    async def scenario(engine: LocalAsyncEngine, core: GatedCore) -> None:
        await engine.add_adapter(spec_of("v1"))
        user = asyncio.create_task(tokens(engine, request_of("a", SILENT, adapter="v1")))
        await asyncio.sleep(0)
        removals = [asyncio.create_task(engine.remove_adapter("v1")) for _ in range(2)]
        await asyncio.sleep(0)
        assert (await engine.stats()).num_running == 1
        assert not any(task.done() for task in removals)
        if how == "drained":
            user.cancel()
            await asyncio.gather(*removals)
            assert core.adapters == set()
        else:
            await engine.add_adapter(spec_of("v1"))
            await asyncio.gather(*removals)
            assert core.adapters == {"v1"}
            user.cancel()

    core = GatedCore()
    with engine_of(core) as engine:
        asyncio.run(scenario(engine, core))


def test_adapter_refusals_are_raised() -> None:
    async def scenario(engine: LocalAsyncEngine) -> None:
        with pytest.raises(errors.AdapterFormatError, match="rank"):
            await engine.add_adapter(spec_of("unwanted"))
        with pytest.raises(errors.UnknownModelError):
            await engine.remove_adapter("v9")

    with engine_of(GatedCore()) as engine:
        asyncio.run(scenario(engine))


def test_a_core_that_fails_fails_all_who_wait_and_all_who_come() -> None:
    async def scenario(engine: LocalAsyncEngine) -> None:
        await engine.add_adapter(spec_of("v1"))
        waiting = [
            asyncio.create_task(tokens(engine, request_of(f"r{i}", SILENT, adapter="v1"))) for i in range(3)
        ]
        await asyncio.sleep(0)
        removal = asyncio.create_task(engine.remove_adapter("v1"))
        await asyncio.sleep(0)
        with pytest.raises(errors.EngineDeadError, match="RuntimeError: the device fell off"):
            await tokens(engine, request_of("bad", RAISE))
        for task in (*waiting, removal):
            with pytest.raises(errors.EngineDeadError, match="fell off"):
                await task
        assert not engine.healthy
        for late in (tokens(engine, request_of("late")), engine.stats(), engine.add_adapter(spec_of("v2"))):
            with pytest.raises(errors.EngineDeadError, match="fell off"):
                await late

    core = GatedCore()
    with engine_of(core) as engine:
        asyncio.run(scenario(engine))
    assert core.closed


def test_closing_ends_requests_in_flight() -> None:
    async def scenario(engine: LocalAsyncEngine) -> None:
        user = asyncio.create_task(tokens(engine, request_of("a", ENDLESS)))
        while not (await engine.stats()).num_running:
            pass
        engine.close()
        engine.close()
        with pytest.raises(errors.EngineDeadError, match="closed"):
            await user

    with engine_of(GatedCore()) as engine:
        asyncio.run(scenario(engine))


def test_commands_queued_during_a_step_are_answered_after_it() -> None:
    async def scenario(engine: LocalAsyncEngine, permits: threading.Semaphore) -> None:
        user = asyncio.create_task(tokens(engine, request_of("a", max_tokens=1)))
        await asyncio.sleep(0)
        stats = asyncio.create_task(engine.stats())
        await asyncio.sleep(0)
        assert not user.done()
        permits.release()
        assert await user == [5]
        assert (await stats).num_steps in (0, 1)  # before the step if the thread had not begun it yet

    core = GatedCore()
    core.permits = threading.Semaphore(0)
    with engine_of(core) as engine:
        asyncio.run(scenario(engine, core.permits))


def test_it_needs_no_server_library() -> None:
    code = (
        "import sys, loraplex.engine.async_local\n"
        "assert not {'zmq', 'msgspec', 'fastapi', 'torch'} & sys.modules.keys()"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(Path(__file__).parents[2])}
    )
