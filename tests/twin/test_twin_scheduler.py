"""Steps of a twin land as the scheduler's own do, though most of their tokens are not reported."""

from __future__ import annotations

import pytest

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.leaping import ANY_TOKEN
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.plan import StepPlan, TokenUpdate
from loraplex.scheduling.work import StepWork
from loraplex.twin.twin_scheduler import TwinScheduler


def make_scheduler(*, keeps_contents: bool) -> TwinScheduler:
    """Return one with too little KV memory for its requests, some of which end at the longest context."""
    config = SchedulerConfig(max_model_len=48, max_running=8, work=StepWork(max_tokens=32))
    memory = SeparateMemory(num_blocks=16, block_size=4, adapter_bytes=0, keeps_contents=keeps_contents)
    scheduler = TwinScheduler(config, memory)
    for number in range(12):
        params = SamplingParams(max_tokens=(1, 2, 9, 40)[number % 4], ignore_eos=True)
        prompt = [number + 2] * (5 + 3 * number % 17)
        scheduler.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    return scheduler


def update_all(scheduler: TwinScheduler, plan: StepPlan) -> list[TokenUpdate]:
    return scheduler.update(plan, {each.request_id: ANY_TOKEN for each in plan.chunks if each.samples})


@pytest.mark.parametrize("keeps_contents", [True, False])
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_landing_decides_and_reports_what_updates_do(keeps_contents: bool, num_ahead: int) -> None:
    twin, own = (make_scheduler(keeps_contents=keeps_contents) for _ in range(2))
    begun: set[str] = set()
    under_way: list[StepPlan] = []
    num_quiet = num_steps = 0
    while own.has_work():
        num_steps += 1
        if num_steps == 20:  # while a step of it may be under way
            for scheduler in (twin, own):
                scheduler.cancel("3")
        plan = own.schedule()
        assert twin.schedule() == plan
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
