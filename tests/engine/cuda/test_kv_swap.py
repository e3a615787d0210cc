"""Keys and values that leave a GPU's memory and come back: the text of every request stays what it is."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import torch
from cuda_engines import interpreted
from driving import Finished, run_to_end, step
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from swapping_engines import CPU, PAGE_BYTES, plain_engine, swap_of

from loraplex.bench.random_engine import random_specs
from loraplex.core.errors import CapacityError, EngineDeadError, ModelError
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.build import choose_device
from loraplex.engine.core import Engine
from loraplex.engine.cuda import host_memory, kv_swap
from loraplex.engine.cuda.device_arena import DeviceArena
from loraplex.engine.cuda.kv_swap import KVSwap
from loraplex.engine.cuda.streams import Moment
from loraplex.engine.options import EngineOptions
from loraplex.scheduling.plan import BlockCopy

(SPEC,) = random_specs("q", "tiny", num_adapters=1, ranks=[7], modules="q")


def page(arena: DeviceArena, number: int) -> torch.Tensor:
    return arena.span(number * PAGE_BYTES, PAGE_BYTES)


def test_what_was_copied_out_is_copied_in_elsewhere() -> None:
    arena, swap = swap_of(4)
    for number in range(3):
        page(arena, number).fill_(number + 1)
    outs = [BlockCopy(0, 2), BlockCopy(1, 3), BlockCopy(2, 0)]
    swap.start(outs, (), Moment(CPU))
    assert [(event.copies, event.out, event.error) for event in swap.poll()] == [(tuple(outs), True, None)]
    swap.start((), [BlockCopy(7, 2), BlockCopy(5, 3), BlockCopy(6, 0)], Moment(CPU))
    assert swap.num_pending == 1
    assert not swap.poll()[0].out
    assert [int(page(arena, number)[0]) for number in (7, 5, 6)] == [1, 2, 3]
    assert [int(page(arena, number)[-1]) for number in (7, 5, 6)] == [1, 2, 3]
    swap.close()


def test_neighbours_are_copied_at_once_and_reported_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, swap = swap_of(8)
    neighbours = [BlockCopy(number, number + 1) for number in (3, 1, 2)]
    assert list(swap._stretches([*neighbours, BlockCopy(6, 0)])) == [
        (PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES),
        (6 * PAGE_BYTES, 0, PAGE_BYTES),
    ]
    monkeypatch.setattr(kv_swap, "_REPORTED_BYTES", 2 * PAGE_BYTES)
    swap.start(neighbours, (), Moment(CPU))
    assert [len(event.copies) for event in swap.poll()] == [2, 1]
    swap.close()


def test_a_copy_that_fails_is_reported_and_fails_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise EngineDeadError("the GPU cannot copy from the host")

    _, swap = swap_of(2)
    with monkeypatch.context() as patch:
        patch.setattr(swap, "_copy_out", broken)
        swap.start([BlockCopy(0, 0)], (), Moment(CPU))
    swap.start([BlockCopy(1, 1)], (), Moment(CPU))
    assert [event.error is None for event in swap.poll()] == [False, True]
    swap.close()


def test_memory_that_the_host_has_not_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match=r"keys and values.*--kv-swap-memory"):
        swap_of(4)


def test_memory_that_cannot_be_pinned_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.driver, "pin", lambda address, num_bytes: 304)
    memory = host_memory.HostMemory(1000, pinned=True, use=host_memory.KV_SWAP)
    with pytest.raises(CapacityError, match=r"cannot pin 1,000 bytes.*--kv-swap-memory"):
        memory.take(0, 1000)
    memory.close()


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(CapacityError, match="hold no block of the KV cache"):
        interpreted(kv_swap_bytes=PAGE_BYTES - 1)


def test_a_cpu_and_tensor_parallelism_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="in host memory already"):
        choose_device(EngineOptions(model="any", device="cpu", kv_swap_memory_bytes=1 << 30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = EngineOptions(model="any", device="cuda", tensor_parallel=2, kv_swap_memory_bytes=1 << 30)
    with pytest.raises(ModelError, match="for one GPU"):
        choose_device(options)


class SlowBus:
    """Lets copies take any time: they are made when they end, and their targets hold rubbish until then."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.waiting: list[tuple[BlockCopy, bool]] = []
        begin, take, bus = KVSwap.start, KVSwap.poll, self

        def start(swap: KVSwap, outs: list[BlockCopy], ins: list[BlockCopy], after: Moment) -> None:
            for copy in ins:
                page(swap._arena, copy.device_block).fill_(113)
            bus.waiting += [(copy, True) for copy in outs] + [(copy, False) for copy in ins]

        def poll(swap: KVSwap) -> object:
            waiting, bus.waiting = bus.waiting, []
            for copy, out in waiting:
                if bus.random.random() < 0.6:
                    bus.waiting.append((copy, out))
                else:
                    begin(swap, *(([copy], []) if out else ([], [copy])), after=Moment(CPU))
            return take(swap)

        monkeypatch.setattr(KVSwap, "start", start)
        monkeypatch.setattr(KVSwap, "poll", poll)
        monkeypatch.setattr(KVSwap, "num_pending", property(lambda swap: len(bus.waiting)))
        monkeypatch.setattr(KVSwap, "has_ended", property(lambda swap: bool(bus.waiting)))


def prompt_of(number: int, length: int, *, shared: int = 0) -> list[int]:
    return [*[11] * shared, *((7 * index + 3 * number) % 256 for index in range(length - shared))]


def request_of(
    number: int, prompt: int, tokens: int, adapter: str | None, *, shared: int = 0
) -> EngineRequest:
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=prompt_of(number, prompt, shared=shared),
        params=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        adapter=adapter,
    )


def test_requests_on_a_gpu_get_the_text_of_an_engine_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(engine: Engine) -> dict[str, list[int]]:
        engine.add_adapter(SPEC)
        engine.add_request(request_of(0, 16, 3, SPEC.version))  # it starts later, with its adapter
        engine.add_request(request_of(1, 29, 6, None))  # it takes all of the memory for blocks in the end
        done = run_to_end(engine)
        return {request_id: found.token_ids for request_id, found in done.items()}

    roomy = interpreted()
    expected = texts(roomy)
    roomy.close()
    bus = SlowBus(0, monkeypatch)
    engine = interpreted(5, kv_swap_bytes=8 * PAGE_BYTES)
    assert texts(engine) == expected
    stats = engine.stats()
    assert not bus.waiting
    assert stats.num_preemptions > 0
    assert stats.kv_blocks_swapped_in > 0
    assert stats.num_kv_blocks_used == 0
    engine.remove_adapter(SPEC.version)
    assert engine.take_removed_adapters() == [SPEC.version]
    engine.check_integrity()
    engine.close()


@lru_cache(maxsize=1)
def roomy_engine() -> Engine:
    return plain_engine(200, 0, [SPEC])


@lru_cache(maxsize=2048)
def alone(number: int, prompt: int, tokens: int, adapter: str | None, shared: int) -> tuple[int, ...]:
    roomy_engine().add_request(request_of(number, prompt, tokens, adapter, shared=shared))
    return tuple(run_to_end(roomy_engine())[str(number)].token_ids)


Asked = tuple[int, int, int, str | None, int]
REQUESTS = st.lists(
    st.tuples(
        st.integers(2, 70),
        st.integers(1, 40),
        st.booleans(),
        st.integers(0, 40),
        st.integers(0, 4),
        st.booleans(),
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=examples(6, 40), deadline=None)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(8, 16),
    num_host=st.integers(1, 40),
    runs_ahead=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_every_request_gets_the_text_that_it_would_have_had_alone(
    requests: list[tuple[int, int, bool, int, int, bool]],
    num_blocks: int,
    num_host: int,
    runs_ahead: bool,
    seed: int,
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        bus = SlowBus(seed, monkeypatch)
        engine = plain_engine(num_blocks, num_host, [SPEC], runs_ahead=runs_ahead)
        done: dict[str, Finished] = {}
        asked: list[Asked] = []
        cancelled = set()
        for number, (prompt, tokens, on_adapter, shared, num_steps, cancels) in enumerate(requests):
            adapter = SPEC.version if on_adapter else None
            asked.append((number, prompt, tokens, adapter, min(shared, prompt - 1)))
            engine.add_request(request_of(*asked[-1][:4], shared=asked[-1][4]))
            for _ in range(num_steps):
                step(engine, done)
            if cancels and bus.random.random() < 0.3:
                cancelled.add(number)
                engine.cancel(str(number))
        for _ in range(5000):
            if not engine.has_work():
                break
            step(engine, done)
        assert not engine.has_work()
        stats = engine.stats()
        assert stats.num_kv_blocks_used == 0
        assert not bus.waiting
        engine.close()
    for each in asked:
        found, expected = tuple(done.get(str(each[0]), Finished()).token_ids), alone(*each)
        assert found == (expected[: len(found)] if each[0] in cancelled else expected)
