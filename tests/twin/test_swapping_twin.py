"""Keys and values that are swapped to the host, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_leaps import QUICK, RATES, assert_same
from twins import own_twin, random_workload

from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError, UserError
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import named_profiles
from loraplex.twin.replay import ReplayOptions, replay
from loraplex.twin.simulator import Simulator


def profile() -> CostModel:
    found = named_profiles()["h200-llama-2-7b"]
    assert isinstance(found, CostModel)
    return found


@pytest.mark.slow
@QUICK
@given(
    seed=st.integers(0, 10_000),
    rps=RATES,
    ahead=st.booleans(),
    num_blocks=st.integers(24, 90),
    num_host_blocks=st.integers(1, 200),
    max_running=st.integers(1, 20),
    cold_start=st.sampled_from([ColdStart.OVERLAP, ColdStart.PIPELINED, ColdStart.AUTO]),
)
def test_a_leap_is_its_steps_while_blocks_are_swapped(
    seed: int,
    rps: float,
    ahead: bool,
    num_blocks: int,
    num_host_blocks: int,
    max_running: int,
    cold_start: ColdStart,
) -> None:
    workload = random_workload(seed, rps=rps)

    def twin(*, leaps: bool) -> Simulator:
        return own_twin(
            shared=True,
            leaps=leaps,
            ahead=ahead,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_running=max_running,
            cold_start=cold_start,
        )

    leaping, stepping = twin(leaps=True), twin(leaps=False)
    one, other = leaping.run(workload), stepping.run(workload)
    assert_same(one, other)
    assert (one.num_swapped_out, one.num_swapped_in) == (other.num_swapped_out, other.num_swapped_in)
    for simulator in (leaping, stepping):
        simulator.scheduler.check_integrity()
        pool = simulator._memory.pool
        assert (pool.num_locked, pool.num_free) == (0, pool.num_blocks)


def test_short_of_memory_what_is_swapped_is_not_computed_again() -> None:
    workload = [replace(each, adapter=0) for each in random_workload(1, num_requests=200, rps=400.0)]
    options = ReplayOptions(num_adapters=1, kv_tokens=4000, staged=True)
    recomputing = replay(profile(), workload, options)
    swapping = replay(profile(), workload, replace(options, kv_swap_bytes=64 << 30))
    assert recomputing.num_preemptions > 0
    assert recomputing.num_swapped_out == 0
    assert swapping.num_swapped_in > 0
    assert all(each.is_served for each in swapping.requests)


def test_an_engine_on_a_cpu_refuses_it() -> None:
    on_cpu = replace(profile(), subject=replace(profile().subject, device="cpu"))
    with pytest.raises(UserError, match="in host memory already"):
        replay(on_cpu, [], ReplayOptions(num_adapters=1, kv_swap_bytes=1 << 30))


def test_memory_for_less_than_a_block_is_refused() -> None:
    with pytest.raises(CapacityError, match="raise --kv-swap-memory"):
        replay(profile(), [], ReplayOptions(num_adapters=1, kv_swap_bytes=1000))
