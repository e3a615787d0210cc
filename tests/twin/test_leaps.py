"""A leap is the steps it stands for, and the compiled engine is the scheduler under the same rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from twins import COSTS, own_twin, random_workload, slot_twin

from loraplex.core.batching import Batching
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError
from loraplex.twin.outcome import Outcome
from loraplex.twin.slot_engine import SlotRun, run_slot_engine
from loraplex.twin.slot_state import Limits, Requests
from loraplex.workload.jsonl import WorkloadRequest

SLOT_ENGINES = st.fixed_dictionaries(
    {
        "num_adapters": st.integers(1, 9),
        "num_slots": st.integers(1, 5),
        "num_blocks": st.integers(16, 90),
        "max_running": st.integers(1, 20),
        "max_step_tokens": st.sampled_from([64, 128, 512]),
    }
)
OWN_ENGINES = st.fixed_dictionaries(
    {
        "num_adapters": st.integers(1, 7),
        "num_blocks": st.integers(24, 90) | st.just(400),  # short of memory, or with room for all
        "max_running": st.integers(1, 20),
        "max_step_tokens": st.sampled_from([16, 64, 512]),
        "shared": st.booleans(),
        "cold_start": st.sampled_from(
            [ColdStart.OVERLAP, ColdStart.ON_DEMAND, ColdStart.PIPELINED, ColdStart.AUTO]
        ),
        "ahead": st.booleans(),
        "position_cost": st.sampled_from([0.0, 0.001, 0.05]),
        "padded": st.booleans(),
        "batching": st.sampled_from([Batching.FCFS, Batching.GROUPED]),
    }
)
QUICK = settings(
    max_examples=examples(8, 50), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
"""Shrinking a workload takes minutes and makes it no clearer."""
RATES = st.sampled_from([1.0, 5.0, 20.0, 100.0])


def times_of(outcome: Outcome) -> Any:
    return np.array([[each.first_token_s, each.finish_s] for each in outcome.requests], np.float64)


def assert_same(one: Outcome, other: Outcome) -> None:
    for name in ("num_steps", "num_loads", "num_preemptions"):
        assert getattr(one, name) == getattr(other, name)
    np.testing.assert_allclose(times_of(one), times_of(other), rtol=1e-9)
    means = [(each.mean_running, each.mean_waiting) for each in (one, other)]
    np.testing.assert_allclose(*means, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(gaps_of(one), gaps_of(other), rtol=1e-6, atol=1e-9)


def gaps_of(outcome: Outcome) -> Any:
    """Return the gap before every token, in rising order."""
    return np.sort(
        [
            first_s + place * growth_s
            for first_s, growth_s, num_steps, num_tokens in outcome.gaps
            for place in range(num_steps)
            for _ in range(num_tokens)
        ]
    )


@pytest.mark.slow
@QUICK
@given(engine=SLOT_ENGINES, seed=st.integers(0, 10_000), rps=RATES)
def test_a_leap_of_an_engine_with_slots_is_its_steps(engine: dict[str, Any], seed: int, rps: float) -> None:
    workload = random_workload(seed, num_adapters=engine["num_adapters"], rps=rps)
    assert_same(slot_twin(**engine).run(workload), slot_twin(**engine, leaps=False).run(workload))


@QUICK
@given(engine=OWN_ENGINES, seed=st.integers(0, 10_000), rps=RATES)
@example(  # one comes as one goes, and all of them attend to as many positions as before
    engine={
        "num_adapters": 7,
        "num_blocks": 400,
        "max_running": 20,
        "max_step_tokens": 512,
        "shared": True,
        "cold_start": ColdStart.AUTO,
        "ahead": True,
    },
    seed=13,
    rps=20.0,
)
def test_a_leap_of_our_own_engine_is_its_steps(engine: dict[str, Any], seed: int, rps: float) -> None:
    workload = random_workload(seed, num_adapters=engine["num_adapters"], rps=rps)
    leaping, stepping = own_twin(**engine), own_twin(**engine, leaps=False)
    assert_same(leaping.run(workload), stepping.run(workload))
    leaping.scheduler.check_integrity()
    stepping.scheduler.check_integrity()


@pytest.mark.slow
@QUICK
@given(engine=OWN_ENGINES, seed=st.integers(0, 10_000), rps=RATES, others_from=st.sampled_from([1, 20, 45]))
def test_a_leap_is_its_steps_before_and_after_other_tenants_come(
    engine: dict[str, Any], seed: int, rps: float, others_from: int
) -> None:
    workload = [
        replace(each, tenant="one" if number < others_from or number % 3 else "other")
        for number, each in enumerate(random_workload(seed, num_adapters=engine["num_adapters"], rps=rps))
    ]
    leaping, stepping = own_twin(**engine), own_twin(**engine, leaps=False)
    assert_same(leaping.run(workload), stepping.run(workload))
    for simulator in (leaping, stepping):
        simulator.scheduler.check_integrity()
    one, other = leaping.scheduler.fair, stepping.scheduler.fair
    assert one.counter("one") == pytest.approx(other.counter("one"))
    assert one.counter("other") == pytest.approx(other.counter("other"))


def compiled(workload: list[WorkloadRequest], engine: dict[str, Any]) -> SlotRun:
    num_adapters = engine["num_adapters"]
    requests = Requests(
        arrival_s=np.array([each.arrival_s for each in workload]),
        prompt_tokens=np.array([each.prompt_tokens for each in workload]),
        output_tokens=np.array([each.output_tokens for each in workload]),
        adapter=np.array([each.adapter for each in workload]),
    )
    limits = Limits(
        num_slots=engine["num_slots"],
        max_rank=8 * num_adapters,
        num_blocks=engine["num_blocks"],
        spare_blocks=0,
        max_running=engine["max_running"],
        max_step_tokens=engine["max_step_tokens"],
        max_open=1_000_000,
        until_s=1e9,
    )
    ranks = 8.0 * (np.arange(num_adapters) + 1)
    return run_slot_engine(requests, limits, COSTS, ranks=ranks, order=np.arange(num_adapters)[::-1].copy())


@QUICK
@given(engine=SLOT_ENGINES, seed=st.integers(0, 10_000), rps=RATES)
def test_the_compiled_engine_decides_as_the_scheduler_does(
    engine: dict[str, Any], seed: int, rps: float
) -> None:
    workload = random_workload(seed, num_adapters=engine["num_adapters"], rps=rps)
    outcome, run = slot_twin(**engine).run(workload), compiled(workload, engine)
    assert outcome.num_steps == run.num_steps
    np.testing.assert_allclose(times_of(outcome), np.stack([run.first_s, run.finish_s], axis=1), rtol=1e-9)


def test_a_memory_too_small_for_one_request_is_refused() -> None:
    workload = [WorkloadRequest(arrival_s=0.0, prompt_tokens=100, output_tokens=200, adapter=0)]
    engine = {"num_adapters": 1, "num_slots": 1, "num_blocks": 18, "max_running": 4, "max_step_tokens": 512}
    with pytest.raises(
        CapacityError, match=r"holds 288 tokens beside the adapters .* a request of 300; give fewer --slots"
    ):
        compiled(workload, engine)
