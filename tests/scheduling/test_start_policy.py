"""Requests join a step while their adapter is being copied unless that delays others too much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.core.cold_start import ColdStart
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.model.shapes import config_of_shape
from loraplex.perf.cost_model import CostKind, CostModel
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.drift import DriftWatch
from loraplex.perf.graph_limits import MAX_GRAPH_ROWS
from loraplex.perf.layer_pipeline import AssistPlan, Bus
from loraplex.perf.least_squares import FitQuality
from loraplex.perf.line import Line
from loraplex.perf.step_cost import RowCurve, StepCost, StepFeatures, StepTerms
from loraplex.perf.subject import Subject
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.plan import StepPlan
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.start_policy import InFlight, StartPolicy
from loraplex.scheduling.work import StepWork

MB = 1 << 20


def costs(*, step_s: float = 5e-3, bytes_per_s: float = 50e9) -> CostModel:
    """Every step takes as long, copies nothing but their bytes."""
    subject = Subject(machine="m", device="cuda", model="tiny", dtype="bfloat16", num_layers=32)
    model = default_cost_model(subject, config_of_shape("tiny").shape, num_cores=8)
    curve = RowCurve(rows=(1, 4096), seconds_at=(step_s, step_s))
    return replace(
        model,
        bus=Bus(copy=Line(latency_s=0.0, unit_s=1 / bytes_per_s), launch_s=0.0),
        step=StepCost(decodes=curve, prompts=curve, terms=StepTerms()),
    )


DECODES = StepFeatures(num_decodes=8)
PROMPTS = StepFeatures(num_prompt_tokens=256)


def joins(
    policy: StartPolicy,
    step: StepFeatures,
    *,
    others: int,
    awaited_mb: int = 0,
    own_mb: int,
    backlog_mb: int = 0,
    steps_before: tuple[StepFeatures, ...] = (),
) -> bool:
    return policy.may_join(
        before=step._replace(num_prompts=others - step.num_decodes),
        after=step._replace(num_prompts=1, num_prompt_tokens=step.num_prompt_tokens + 128),
        in_flight_before=InFlight(awaited_bytes=awaited_mb * MB, backlog_bytes=backlog_mb * MB),
        in_flight_after=InFlight(awaited_bytes=(awaited_mb + own_mb) * MB, backlog_bytes=backlog_mb * MB),
        steps_before=steps_before,
    )


def test_a_copy_that_is_faster_than_the_step_holds_nobody_up() -> None:
    auto = StartPolicy(ColdStart.AUTO, DriftWatch(costs()))
    assert joins(auto, DECODES, others=8, own_mb=100)  # 2 ms of copies in a step of 5


def test_those_who_decode_do_not_wait_for_a_slow_copy() -> None:
    auto = StartPolicy(ColdStart.AUTO, DriftWatch(costs()))
    assert not joins(auto, DECODES, others=8, own_mb=1000)
    assert not joins(auto, DECODES, others=8, own_mb=100, backlog_mb=100)


def test_what_arrives_while_the_step_before_runs_holds_nobody_up() -> None:
    auto = StartPolicy(ColdStart.AUTO, DriftWatch(costs()))
    assert not joins(auto, DECODES, others=8, own_mb=400)  # 8 ms of copies in a step of 5
    assert joins(auto, DECODES, others=8, own_mb=400, steps_before=(DECODES,))
    assert not joins(auto, DECODES, others=8, own_mb=1000, steps_before=(DECODES, PROMPTS))


def test_alone_it_starts_at_once_however_slow() -> None:
    auto = StartPolicy(ColdStart.AUTO, DriftWatch(costs()))
    assert joins(auto, StepFeatures(), others=0, own_mb=10_000)


def test_prompts_wait_together_as_long_as_that_is_the_lesser_delay() -> None:
    auto = StartPolicy(ColdStart.AUTO, DriftWatch(costs()))
    assert joins(auto, PROMPTS, others=1, own_mb=400)  # 3 ms more for one, or 5 for the other
    assert not joins(auto, PROMPTS, others=4, own_mb=400)


def test_what_steps_are_found_to_take_changes_the_answer() -> None:
    watch = DriftWatch(costs())
    auto = StartPolicy(ColdStart.AUTO, watch)
    assert not joins(auto, DECODES, others=8, own_mb=400)
    for _ in range(200):
        auto.observe_step(DECODES, 40e-3)
    assert watch.model.corrections.of(CostKind.STEP) > 2
    assert joins(auto, DECODES, others=8, own_mb=400)


def test_what_copies_are_found_to_take_changes_the_answer() -> None:
    auto = StartPolicy(ColdStart.AUTO, DriftWatch(costs()))
    assert joins(auto, DECODES, others=8, own_mb=100)
    for _ in range(200):
        auto.observe_copy(100 * MB, 20e-3)  # ten times as long as was said
    assert not joins(auto, DECODES, others=8, own_mb=100)


@pytest.mark.parametrize(
    ("cold_start", "expected"), [(ColdStart.PIPELINED, True), (ColdStart.OVERLAP, False)]
)
def test_the_others_ask_nobody(cold_start: ColdStart, expected: bool) -> None:
    policy = StartPolicy(cold_start, DriftWatch(costs()))
    assert policy.streams is expected
    assert joins(policy, DECODES, others=8, own_mb=10_000) is expected


def test_cpu_workers_take_as_many_layers_as_the_bus_is_slow() -> None:
    num_tokens = 32

    def layers(bytes_per_s: float, num_workers: int = 8) -> int:
        watch = DriftWatch(costs(bytes_per_s=bytes_per_s))
        policy = StartPolicy(ColdStart.CPU_ASSIST, watch, num_workers)
        return policy.assist_plan(100 * MB, num_tokens).num_layers

    assert layers(50e9) == 0
    assert 1 < layers(0.2e9) < 32
    assert layers(0.02e9) >= layers(0.2e9)
    assert layers(0.2e9, num_workers=0) == 0
    pipelined = StartPolicy(ColdStart.PIPELINED, DriftWatch(costs(bytes_per_s=0.2e9)), 8)
    assert pipelined.assist_plan(100 * MB, num_tokens).num_layers == 0


@pytest.mark.parametrize("bytes_per_s", [0.2e9, 0.5e9, 2e9, 4e9])
def test_auto_uses_workers_only_if_they_save_more_than_their_cost_may_be_off(bytes_per_s: float) -> None:
    num_tokens, model = 32, costs(bytes_per_s=bytes_per_s)
    prompt = StepFeatures(num_prompts=1, num_prompt_tokens=num_tokens)

    def plan(cold_start: ColdStart, error: float) -> AssistPlan:
        quality = FitQuality(num_samples=9, r_squared=0.9, mean_error=error, worst_error=error)
        known = replace(model, assist=replace(model.assist, quality=quality))
        return StartPolicy(cold_start, DriftWatch(known), 8).assist_plan(100 * MB, num_tokens)

    asked = plan(ColdStart.CPU_ASSIST, 0.5)
    assert asked.num_layers > 0
    saved = asked.saved_s / (model.step_s(prompt) + asked.delay_s)
    assert plan(ColdStart.AUTO, saved * 0.99) == asked
    assert plan(ColdStart.AUTO, saved * 1.01) == AssistPlan()


def assisted_joins(policy: StartPolicy, step: StepFeatures, *, delay_s: float, own_mb: int = 100) -> bool:
    """Return whether a request joins whose adapter workers assist with."""
    return policy.may_join(
        before=step,
        after=step._replace(num_prompts=step.num_prompts + 1, num_prompt_tokens=128),
        in_flight_before=InFlight(awaited_bytes=0, backlog_bytes=0),
        in_flight_after=InFlight(
            awaited_bytes=0, backlog_bytes=0, assisted_bytes=own_mb * MB, assist_delay_s=delay_s
        ),
    )


def test_with_workers_a_request_joins_if_it_gains_more_than_the_decodes_lose() -> None:
    slow = DriftWatch(costs(bytes_per_s=10e9))  # 10 ms for 100 MB
    auto = StartPolicy(ColdStart.AUTO, slow, 8)
    assert assisted_joins(auto, DECODES, delay_s=4e-3)
    assert not assisted_joins(auto, DECODES._replace(num_decodes=64), delay_s=4e-3)
    assert not assisted_joins(auto, DECODES, delay_s=4e-3, own_mb=20)


def test_a_prompt_in_the_step_counts_as_much_as_the_request_itself() -> None:
    auto = StartPolicy(ColdStart.AUTO, DriftWatch(costs(bytes_per_s=10e9)), 8)
    one = DECODES._replace(num_decodes=1, num_prompts=1)
    assert assisted_joins(auto, one, delay_s=4e-3)
    assert not assisted_joins(auto, one._replace(num_prompts=2), delay_s=4e-3)


def test_beside_workers_a_request_joins_without_them_if_it_gains_more_than_the_decodes_lose() -> None:
    slow = DriftWatch(costs(bytes_per_s=10e9))  # 9 ms for 90 MB, in a step of 5 ms

    def joins_decodes(num_workers: int, num_decodes: int) -> bool:
        auto = StartPolicy(ColdStart.AUTO, slow, num_workers)
        return joins(auto, DECODES._replace(num_decodes=num_decodes), others=num_decodes, own_mb=90)

    assert joins_decodes(8, 8)
    assert not joins_decodes(8, 32)
    assert not joins_decodes(0, 8)


def test_a_request_that_delays_nobody_joins_a_step_that_stalls_anyway() -> None:
    auto = StartPolicy(ColdStart.AUTO, DriftWatch(costs(bytes_per_s=1e9)))
    assert joins(auto, DECODES, others=8, awaited_mb=50, own_mb=0, steps_before=(DECODES,))


def test_workers_get_fewer_layers_where_the_copy_runs_beside_steps_in_flight() -> None:
    policy = StartPolicy(ColdStart.CPU_ASSIST, DriftWatch(costs(bytes_per_s=5e9)), 8)

    def layers(*steps_before: StepFeatures) -> int:
        return policy.assist_plan(100 * MB, 32, steps_before=steps_before).num_layers

    assert layers() > layers(DECODES) > layers(DECODES, DECODES, DECODES, DECODES) == 0


def test_workers_get_fewer_layers_the_longer_the_step_takes() -> None:
    model = costs(bytes_per_s=5e9)
    slower = RowCurve(rows=(1, 64), seconds_at=(5e-3, 20e-3))
    model = replace(model, step=replace(model.step, prompts=slower))
    policy = StartPolicy(ColdStart.CPU_ASSIST, DriftWatch(model), 8)
    alone, beside = (
        policy.assist_plan(100 * MB, 32, beside=StepFeatures(num_decodes=number)).num_layers
        for number in (0, 32)
    )
    assert alone > beside


# ---- in the scheduler


def scheduler_of(model: CostModel, cold_start: ColdStart = ColdStart.AUTO, num_workers: int = 0) -> Scheduler:
    arena = Arena(num_pages=100, page_bytes=MB, block_size=16, host_bytes=1 << 40)
    config = SchedulerConfig(max_model_len=200, cold_start=cold_start, num_workers=num_workers)
    return Scheduler(config, arena, DriftWatch(model))


def add(
    scheduler: Scheduler,
    request_id: str,
    adapter: str | None = None,
    num_tokens: int = 20,
    prompt_logprobs: int | None = None,
) -> None:
    scheduler.add(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=list(range(num_tokens)),
            params=SamplingParams(max_tokens=50, ignore_eos=True, prompt_logprobs=prompt_logprobs),
            adapter=adapter,
        )
    )


def stage(scheduler: Scheduler, version: str, num_bytes: int) -> None:
    scheduler.adapters.add(version, num_bytes)
    scheduler.adapters.stage_ahead(version)
    assert [read.version for read in scheduler.schedule().adapter_reads] == [version]
    scheduler.adapter_read(version)


def land(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.update(plan, {chunk.request_id: 5 for chunk in plan.chunks if chunk.samples})


def test_a_request_runs_in_the_step_that_its_load_is_decided_with() -> None:
    scheduler = scheduler_of(costs())
    stage(scheduler, "v", MB)
    add(scheduler, "a", "v")
    plan = scheduler.schedule()
    assert [(load.version, load.awaited) for load in plan.adapter_loads] == [("v", True)]
    assert [chunk.request_id for chunk in plan.chunks] == ["a"]


def test_beside_others_a_slow_load_is_waited_for_by_its_own_request_alone() -> None:
    scheduler = scheduler_of(costs(bytes_per_s=1e9))
    stage(scheduler, "v", 50 * MB)
    add(scheduler, "base")
    land(scheduler, scheduler.schedule())
    add(scheduler, "a", "v")
    plan = scheduler.schedule()
    assert [(load.version, load.awaited) for load in plan.adapter_loads] == [("v", False)]
    assert [chunk.request_id for chunk in plan.chunks] == ["base"]
    land(scheduler, plan)
    scheduler.adapter_loaded("v")
    assert {chunk.request_id for chunk in scheduler.schedule().chunks} == {"a", "base"}


@pytest.mark.parametrize("lands_first", [True, False])
def test_a_load_that_the_step_under_way_hides_is_waited_for_by_nobody(lands_first: bool) -> None:
    scheduler = scheduler_of(costs(bytes_per_s=10e9))
    stage(scheduler, "v", 50 * MB)
    add(scheduler, "base")
    land(scheduler, scheduler.schedule())
    under_way = scheduler.schedule()
    if lands_first:
        land(scheduler, under_way)
    add(scheduler, "a", "v")
    expected = ["base"] if lands_first else ["base", "a"]
    assert [chunk.request_id for chunk in scheduler.schedule().chunks] == expected


def test_a_load_goes_behind_a_step_only_if_there_is_one_that_does_not_need_it() -> None:
    scheduler = scheduler_of(costs(bytes_per_s=1e9))
    for version in ("v", "w"):
        stage(scheduler, version, 40 * MB)
    add(scheduler, "a", "v")
    plan = scheduler.schedule()
    assert [(load.version, load.awaited, load.behind) for load in plan.adapter_loads] == [("v", True, False)]
    land(scheduler, plan)
    scheduler.adapter_loaded("v")
    add(scheduler, "b", "w")
    plan = scheduler.schedule()
    assert [(load.version, load.awaited, load.behind) for load in plan.adapter_loads] == [("w", False, True)]


def test_what_a_step_took_is_not_asked_of_adapters_that_are_gone() -> None:
    scheduler = scheduler_of(costs())
    stage(scheduler, "v", MB)
    add(scheduler, "a", "v")
    plan = scheduler.schedule()
    scheduler.cancel("a")
    scheduler.adapters.remove("v")
    scheduler.adapter_loaded("v")
    scheduler.adapters.take_removed()
    scheduler.adapters.observe_step(plan, 1.0)
    assert step_ratio(scheduler) == 1.0


def test_nothing_is_learnt_from_a_step_that_may_have_waited() -> None:
    scheduler = scheduler_of(costs())
    stage(scheduler, "v", MB)
    add(scheduler, "a", "v")
    waits = scheduler.schedule()
    assert waits.stalls
    scheduler.adapters.observe_step(waits, 1.0)
    assert step_ratio(scheduler) == 1.0
    land(scheduler, waits)
    scheduler.adapter_loaded("v")
    scheduler.adapters.observe_step(scheduler.schedule(), 1.0)
    assert step_ratio(scheduler) > 1.0


def test_no_layers_are_planned_for_workers_of_which_none_is_ready() -> None:
    scheduler = scheduler_of(costs(bytes_per_s=0.2e9), ColdStart.CPU_ASSIST, num_workers=8)
    for version, num_ready in (("v", 0), ("w", 8)):
        stage(scheduler, version, 50 * MB)
        scheduler.adapters.set_num_workers(num_ready)
        add(scheduler, f"on {version}", version)
        plan = scheduler.schedule()
        assert [load.assisted_layers > 0 for load in plan.adapter_loads] == [num_ready > 0]
        land(scheduler, plan)
        scheduler.adapter_loaded(version)
        scheduler.cancel(f"on {version}")


def test_workers_are_planned_by_the_steps_in_flight_and_the_requests_that_decode() -> None:
    model = costs(bytes_per_s=2.5e9)
    slower = RowCurve(rows=(1, 20, 30), seconds_at=(5e-3, 5e-3, 20e-3))
    model = replace(model, step=replace(model.step, prompts=slower))

    def layers(num_others: int, *, lands: bool) -> int:
        scheduler = scheduler_of(model, ColdStart.CPU_ASSIST, num_workers=8)
        stage(scheduler, "v", 50 * MB)
        for number in range(num_others):
            add(scheduler, f"base {number}", num_tokens=2)
        plan = scheduler.schedule()
        if lands and plan.chunks:
            land(scheduler, plan)
        add(scheduler, "a", "v")
        (load,) = scheduler.schedule().adapter_loads
        return load.assisted_layers

    assert layers(0, lands=True) > layers(1, lands=False) > 0
    assert layers(0, lands=True) > layers(8, lands=True) > 0


def test_workers_are_planned_for_the_part_of_a_prompt_that_a_step_computes() -> None:
    model = costs(bytes_per_s=0.5e9)

    def layers(prompt: int, max_tokens: int) -> int:
        arena = Arena(num_pages=100, page_bytes=MB, block_size=16, host_bytes=1 << 40)
        config = SchedulerConfig(
            max_model_len=600,
            cold_start=ColdStart.CPU_ASSIST,
            num_workers=8,
            work=StepWork(max_tokens=max_tokens),
        )
        scheduler = Scheduler(config, arena, DriftWatch(model))
        stage(scheduler, "v", 50 * MB)
        add(scheduler, "a", "v", prompt)
        (load,) = scheduler.schedule().adapter_loads
        return load.assisted_layers

    assert layers(512, 32) == layers(32, 32) > layers(512, 512)


def test_no_layers_are_planned_for_steps_that_workers_never_assist_with() -> None:
    def layers(prompt: int, prompt_logprobs: int | None = None) -> int:
        arena = Arena(num_pages=300, page_bytes=MB, block_size=16, host_bytes=1 << 40)
        config = SchedulerConfig(max_model_len=1200, cold_start=ColdStart.CPU_ASSIST, num_workers=8)
        # So slow a bus that workers pay for any prompt.
        scheduler = Scheduler(config, arena, DriftWatch(costs(bytes_per_s=0.01e9)))
        stage(scheduler, "v", 50 * MB)
        add(scheduler, "a", "v", prompt, prompt_logprobs)
        (load,) = scheduler.schedule().adapter_loads
        return load.assisted_layers

    assert layers(MAX_GRAPH_ROWS) > 0 == layers(MAX_GRAPH_ROWS + 1)
    assert layers(100) > 0 == layers(100, prompt_logprobs=1), "prompts that are scored run without a graph"


def step_ratio(scheduler: Scheduler) -> float:
    """Return the ratio of measured to predicted times of steps."""
    watch = scheduler.adapters._costs
    assert watch is not None
    return watch.ratio(CostKind.STEP)
