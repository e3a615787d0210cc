"""Steps of a twin land as the scheduler's own do, though most of their tokens are not reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.core.tenants import BATCH_PRIORITY
from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.plan import Chunk, StepPlan, TokenUpdate
from loraplex.scheduling.step_features import step_features
from loraplex.scheduling.work import StepWork
from loraplex.twin.counted_blocks import CountedPool
from loraplex.twin.leaping import ANY_TOKEN
from loraplex.twin.quick_scheduler import QuickScheduler, StepChunks
from loraplex.twin.twin_scheduler import TwinScheduler


def make_scheduler(kind: type[TwinScheduler], *, keeps_contents: bool, max_running: int = 8) -> TwinScheduler:
    """Return one with too little KV memory for its requests, some of which end at the longest context."""
    config = SchedulerConfig(max_model_len=48, max_running=max_running, work=StepWork(max_tokens=32))
    pool = BlockPool if keeps_contents else CountedPool
    memory = SeparateMemory(num_blocks=16, block_size=4, adapter_bytes=0, pool=pool)
    scheduler = kind(config, memory)
    for number in range(12):
        params = SamplingParams(max_tokens=(1, 2, 9, 40)[number % 4], ignore_eos=True)
        prompt = [number + 2] * (5 + 3 * number % 17)
        scheduler.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    return scheduler


def update_all(scheduler: TwinScheduler, plan: StepPlan) -> list[TokenUpdate]:
    return scheduler.update(plan, {each.request_id: ANY_TOKEN for each in plan.chunks if each.samples})


def looked_at(plan: StepPlan) -> StepPlan:
    """Return a plan whose chunks are compared by all but their tokens, which a twin makes up."""
    chunks = [chunk._replace(token_ids=[ANY_TOKEN] * chunk.num_tokens) for chunk in plan.chunks]
    return plan._replace(chunks=tuple(sorted(chunks, key=lambda chunk: int(chunk.request_id))))


@pytest.mark.parametrize(
    ("kind", "keeps_contents"), [(TwinScheduler, True), (TwinScheduler, False), (QuickScheduler, False)]
)
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_landing_decides_and_reports_what_updates_do(
    kind: type[TwinScheduler], keeps_contents: bool, num_ahead: int
) -> None:
    twin = make_scheduler(kind, keeps_contents=keeps_contents)
    own = make_scheduler(TwinScheduler, keeps_contents=keeps_contents)
    begun: set[str] = set()
    under_way: list[StepPlan] = []
    num_quiet = num_steps = 0
    while own.has_work():
        num_steps += 1
        if num_steps == 20:  # while a step of it may be under way
            for scheduler in (twin, own):
                scheduler.cancel("3")
        plan = own.schedule()
        decided = twin.schedule()
        assert looked_at(decided) == looked_at(plan)
        under_way += [plan] if plan.chunks else []
        while len(under_way) > (num_ahead if plan.chunks else 0):
            landed = under_way.pop(0)
            updates, (seen, num_tokens) = update_all(own, landed), twin.land(landed)
            visible = [
                each for each in updates if each.request_id not in begun or each.finish_reason is not None
            ]
            assert seen == visible
            assert num_tokens == len(updates)
            begun |= {each.request_id for each in updates}
            num_quiet += len(updates) - len(seen)
        twin.check_integrity()
    assert not twin.has_work()
    assert num_quiet > 50
    assert own.stats(num_steps).num_preemptions > 0


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("max_running", [2, 8])
def test_lines_of_batches_give_way_alike(num_ahead: int, max_running: int) -> None:
    """With two running requests they give way for a place, with eight for memory."""
    kinds = (QuickScheduler, TwinScheduler)
    quick, own = (make_scheduler(each, keeps_contents=False, max_running=max_running) for each in kinds)
    line = SamplingParams(max_tokens=30, ignore_eos=True)
    for scheduler in (quick, own):
        for number in range(12):
            scheduler.cancel(str(number))
        for number in range(20, 26):
            scheduler.add(
                EngineRequest(
                    request_id=str(number), prompt_token_ids=[7] * 9, params=line, priority=BATCH_PRIORITY
                )
            )
    plans: list[tuple[StepPlan, StepPlan]] = []
    num_steps, preempted = 0, set[str]()
    while own.has_work():
        num_steps += 1
        if num_steps % 5 == 0 and num_steps < 30:
            for scheduler in (quick, own):
                live = EngineRequest(
                    request_id=str(30 + num_steps),
                    prompt_token_ids=[3] * 20,
                    params=replace(line, max_tokens=3),
                )
                scheduler.add(live)
        plan, decided = own.schedule(), quick.schedule()
        assert looked_at(decided) == looked_at(plan)
        preempted.update(plan.preempted)
        plans += [(plan, decided)] if plan.chunks else []
        while len(plans) > (num_ahead if plan.chunks else 0):
            of_own, of_quick = plans.pop(0)
            update_all(own, of_own)
            quick.land(of_quick)
        quick.check_integrity()
        own.check_integrity()
    assert not quick.has_work()
    assert preempted


def test_a_step_has_the_features_of_its_chunks() -> None:
    """Requests with and without adapters, of two sizes: decodes, prompts, and prompts of one token."""
    config = SchedulerConfig(max_model_len=48, max_running=8, work=StepWork(max_tokens=32))
    memory = SeparateMemory(num_blocks=64, block_size=4, adapter_bytes=100, pool=CountedPool)
    scheduler = QuickScheduler(config, memory)
    sizes = {"small": 10, "large": 30}
    for version, num_bytes in sizes.items():
        scheduler.adapters.add(version, num_bytes)
    for number in range(9):
        adapter = (None, "small", "large")[number % 3]
        prompt, params = [1] * (1, 9, 21)[number // 3], SamplingParams(max_tokens=6, ignore_eos=True)
        scheduler.add(
            EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params, adapter=adapter)
        )
    found = set()
    while scheduler.has_work():
        plan = scheduler.schedule()
        chunks: Sequence[Chunk] = plan.chunks
        assert isinstance(chunks, StepChunks)
        assert chunks.features(sizes.__getitem__) == step_features(list(chunks), sizes.__getitem__)
        found |= {(chunk.num_tokens == 1, chunk.adapter) for chunk in chunks}
        for load in plan.adapter_loads:
            scheduler.adapter_loaded(load.version)
        if chunks:
            scheduler.land(plan)
    assert found == {(decodes, adapter) for decodes in (True, False) for adapter in (None, *sizes)}
