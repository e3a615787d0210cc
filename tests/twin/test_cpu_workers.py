"""CPU workers in the twin: what they add to a step, and what they save where the bus is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from twins import imagined_machine

from loraplex.core.cold_start import ColdStart
from loraplex.perf.assist_cost import AssistCost
from loraplex.perf.cost_model import CostModel
from loraplex.perf.layer_pipeline import Bus
from loraplex.perf.line import Line
from loraplex.perf.subject import Subject, machine_name
from loraplex.twin.replay import ReplayOptions, replay
from loraplex.twin.times import CostModelTimes, LoadInFlight
from loraplex.workload.jsonl import WorkloadRequest

ADAPTER_BYTES = 100 << 20
STEP_S = 8e-3


def machine(*, bytes_per_s: float) -> CostModel:
    return replace(
        imagined_machine(),
        bus=Bus(copy=Line(latency_s=0.0, unit_s=1 / bytes_per_s), launch_s=0.0),
        assist=AssistCost(round_trip_s=30e-6, token_s=0.5e-6, call_s=50e-6, weight_s=1e-10, row_s=1e-11),
    )


def ttft_s(cold_start: ColdStart, *, bytes_per_s: float, cpu_workers: int = 0) -> float:
    """Return the TTFT of one request on an idle engine, its adapter in host memory."""
    outcome = replay(
        machine(bytes_per_s=bytes_per_s),
        [WorkloadRequest(arrival_s=0.0, prompt_tokens=128, output_tokens=4, adapter=0)],
        ReplayOptions(
            num_adapters=1,
            adapter_bytes=ADAPTER_BYTES,
            cold_start=cold_start,
            cpu_workers=cpu_workers,
            staged=True,
        ),
    )
    (served,) = outcome.requests
    assert served.first_token_s is not None
    return served.first_token_s


def test_workers_save_time_on_a_slow_bus_and_auto_uses_them() -> None:
    pipelined = ttft_s(ColdStart.PIPELINED, bytes_per_s=6e9)
    assisted = ttft_s(ColdStart.CPU_ASSIST, bytes_per_s=6e9, cpu_workers=8)
    assert assisted < pipelined < ttft_s(ColdStart.ON_DEMAND, bytes_per_s=6e9)
    assert ttft_s(ColdStart.AUTO, bytes_per_s=6e9, cpu_workers=8) == assisted


@pytest.mark.parametrize("bytes_per_s", [6e9, 55e9])
def test_adapters_in_host_memory_are_loaded_before_a_run_that_keeps_all(bytes_per_s: float) -> None:
    cached = ttft_s(ColdStart.CACHED, bytes_per_s=bytes_per_s)
    assert cached == ttft_s(ColdStart.CACHED, bytes_per_s=1e12) < ttft_s(ColdStart.AUTO, bytes_per_s=6e9)


def test_as_many_workers_start_as_in_the_live_engine() -> None:
    def seconds(subject: Subject, cpu_workers: int | None) -> float:
        model = replace(machine(bytes_per_s=6e9), subject=subject)
        options = ReplayOptions(
            num_adapters=1,
            adapter_bytes=ADAPTER_BYTES,
            cold_start=ColdStart.CPU_ASSIST,
            cpu_workers=cpu_workers,
            staged=True,
        )
        workload = [WorkloadRequest(arrival_s=0.0, prompt_tokens=128, output_tokens=4, adapter=0)]
        (served,) = replay(model, workload, options).requests
        assert served.first_token_s is not None
        return served.first_token_s

    here = imagined_machine().subject
    two_cores = replace(here, machine=machine_name(num_cores=2, cpu="c", gpu="g"))
    many_cores = replace(here, machine=machine_name(num_cores=16, cpu="c", gpu="g"))
    assert two_cores.num_cores == 2
    assert replace(here, machine="a machine").num_cores is None
    assert seconds(two_cores, None) == seconds(two_cores, 0) > seconds(two_cores, 8)
    enough = next(number for number in range(9) if seconds(many_cores, number) == seconds(many_cores, None))
    assert 0 < enough <= 8


def test_a_bus_can_be_slowed_down() -> None:
    slow, fast = machine(bytes_per_s=6e9), machine(bytes_per_s=55e9)
    options = ReplayOptions(
        num_adapters=1,
        adapter_bytes=ADAPTER_BYTES,
        cold_start=ColdStart.CPU_ASSIST,
        cpu_workers=8,
        staged=True,
    )
    workload = [WorkloadRequest(arrival_s=0.0, prompt_tokens=128, output_tokens=4, adapter=0)]
    slowed = replace(options, max_copy_bytes_per_s=6e9)
    assert replay(fast, workload, slowed).requests == replay(slow, workload, options).requests
    assert replay(slow, workload, replace(slowed, max_copy_bytes_per_s=55e9)).requests == (
        replay(slow, workload, options).requests
    ), "it makes no bus faster"


def test_on_a_fast_bus_they_change_nothing() -> None:
    assert ttft_s(ColdStart.AUTO, bytes_per_s=55e9, cpu_workers=8) == ttft_s(ColdStart.AUTO, bytes_per_s=55e9)


def test_a_step_waits_for_workers_and_for_the_layers_after_theirs() -> None:
    model = machine(bytes_per_s=6e9)
    times = CostModelTimes(model, {"v": ADAPTER_BYTES}, num_workers=8)
    copy_s, num_layers = model.copy_s(ADAPTER_BYTES), model.subject.num_layers
    layer_s = model.assist.layer_s(
        ADAPTER_BYTES // (2 * num_layers), num_groups=1, num_tokens=128, num_workers=8
    )

    def stall_s(assisted: int) -> float:
        return times.stall_s(STEP_S, [("v", LoadInFlight(0.0, copy_s, assisted, 128))])

    assert stall_s(0) == pytest.approx(copy_s - STEP_S * (1 - 1 / num_layers))
    assert stall_s(num_layers) == pytest.approx(num_layers * layer_s)
    half = num_layers // 2
    last_s = copy_s / 2 - STEP_S * (1 - 1 / num_layers)  # the other half is copied first
    assert stall_s(half) == pytest.approx(max(half * layer_s, last_s))
