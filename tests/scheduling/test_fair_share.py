"""Tenants that share an engine: who is served next, what it is charged, and who gives back memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from examples import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from loraplex.core.batching import Batching
from loraplex.core.clock import ManualClock
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.core.shape import ModelShape
from loraplex.core.tenants import BATCH_PRIORITY, TenantPolicy
from loraplex.perf.cost_model import CostKind, CostModel
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.drift import DriftWatch
from loraplex.perf.subject import Subject, shape_key
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.fair_share import RequestCosts
from loraplex.scheduling.memory import SeparateMemory
from loraplex.scheduling.plan import StepPlan
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.work import StepWork

QUICK = settings(
    max_examples=examples(15, 80), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
MAX_PROMPT, MAX_OUTPUT = 12, 8
SHAPE = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=100,
    max_position=64,
)


def cost_model() -> CostModel:
    subject = Subject(machine="one", device="cuda", model=shape_key(SHAPE), dtype="bfloat16", num_layers=2)
    return default_cost_model(subject, SHAPE, num_cores=2)


class Bench:
    """A scheduler whose steps take a second each, and what it served."""

    def __init__(
        self,
        policies: Sequence[TenantPolicy] = (),
        *,
        max_running: int = 4,
        num_blocks: int = 200,
        batching: Batching = Batching.FCFS,
        **config: Any,
    ) -> None:
        self.clock = ManualClock()
        memory = SeparateMemory(num_blocks=num_blocks, block_size=4, adapter_bytes=100)
        options: dict[str, Any] = {"max_model_len": 64, "work": StepWork(max_tokens=64)} | config
        costs = DriftWatch(cost_model()) if batching.needs_costs else None
        self.scheduler = Scheduler(
            SchedulerConfig(max_running=max_running, batching=batching, **options),
            memory,
            costs,
            clock=self.clock,
        )
        self.scheduler.fair.set_policies(policies)
        self.max_running = max_running
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.preempted: list[str] = []
        self.num_added = 0

    def add(
        self, tenant: str = "", request_id: str = "", prompt: int = 4, output: int = 2, **fields: Any
    ) -> str:
        self.num_added += 1
        request_id = request_id or f"{tenant}{self.num_added}"
        self.scheduler.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=[self.num_added] * prompt,
                params=SamplingParams(max_tokens=output, ignore_eos=True),
                tenant=tenant,
                **fields,
            )
        )
        return request_id

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.begun += [
            chunk.request_id
            for chunk in plan.chunks
            if chunk.start == 0 and chunk.request_id not in self.begun
        ]
        self.preempted += plan.preempted
        assert not {*plan.preempted} & {chunk.request_id for chunk in plan.chunks}
        for load in plan.adapter_loads:
            self.scheduler.adapter_loaded(load.version)
        updates = self.scheduler.take_failures()
        if plan.chunks:
            tokens = {each.request_id: 7 for each in plan.chunks if each.samples}
            updates += self.scheduler.update(plan, tokens)
        self.ended += [each.request_id for each in updates if each.finish_reason is not None]
        self.scheduler.check_integrity()
        self.clock.advance(1.0)
        return plan

    def run(self, most_steps: int = 2000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.request_ids:
                return
            self.step()
        raise AssertionError("requests starve")

    def begun_in(self, *request_ids: str) -> list[str]:
        """Return these requests in the order in which they began."""
        return sorted(request_ids, key=self.begun.index)


# ---- whose turn it is


def test_tenants_that_wait_take_turns_however_many_requests_each_has() -> None:
    bench = Bench(max_running=1)
    for _ in range(5):
        bench.add("many")
    bench.step()  # the first runs
    bench.add("few")
    bench.add("few")
    bench.run()
    assert [each[:-1] for each in bench.begun] == ["many", "few", "many", "few", "many", "many", "many"]


def test_a_tenant_of_twice_the_share_gets_twice_the_service() -> None:
    bench = Bench([TenantPolicy(name="big", share=2.0)], max_running=1)
    for _ in range(12):
        bench.add("big")
        bench.add("small")
    for _ in range(24):
        bench.step()
    begun = Counter(each.rstrip("0123456789") for each in bench.begun)
    assert begun["big"] / begun["small"] == pytest.approx(2.0, rel=0.2)


def test_who_had_nothing_waiting_saves_nothing_up() -> None:
    bench = Bench(max_running=1)
    bench.add("idle")
    bench.run()
    for _ in range(20):
        bench.add("busy")
    for _ in range(10):
        bench.step()
    level = bench.scheduler.fair.counter("busy")
    bench.add("idle")
    assert bench.scheduler.fair.counter("idle") == level


def test_tenants_of_a_lower_priority_come_first_whatever_they_got() -> None:
    bench = Bench([TenantPolicy(name="batch", priority=1)], max_running=1)
    for _ in range(4):
        bench.add("batch")
    bench.step()
    online = [bench.add("online") for _ in range(4)]
    bench.run()
    assert bench.begun[1:5] == online


def test_a_request_of_a_lower_priority_overtakes_those_of_its_own_tenant_alone() -> None:
    bench = Bench(max_running=1)
    bench.add("a")
    bench.step()
    late, other = bench.add("a"), bench.add("b")
    first = bench.add("a", priority=-5)
    bench.run()
    assert bench.begun_in(late, other, first) == [other, first, late]


@pytest.mark.parametrize("special", [{"priority": 1}, {"slo_ttft_s": 9.0}])
def test_an_order_is_kept_only_while_requests_ask_for_one(special: dict[str, Any]) -> None:
    bench = Bench(max_running=2)
    fair = bench.scheduler.fair
    bench.add(output=3)
    bench.scheduler.cancel(bench.add(**special))
    assert not fair.is_shared
    bench.add(**special)
    bench.step()
    assert fair.is_shared
    bench.run()
    assert not fair.is_shared


def test_without_tenants_a_priority_is_the_order_as_in_vllm() -> None:
    bench = Bench(max_running=1)
    bench.add(request_id="runs")
    bench.step()
    ids = [bench.add(priority=priority) for priority in (0, 3, -1, 0, -1, 2)]
    bench.run()
    assert bench.begun[1:] == [ids[n] for n in (2, 4, 0, 3, 5, 1)]


# ---- objectives


def test_who_can_still_meet_its_objective_comes_before_who_cannot() -> None:
    bench = Bench([TenantPolicy(name="a", slo_ttft=3.0)], max_running=1)
    bench.add("a", output=6)
    bench.step()
    lost = bench.add("a")
    for _ in range(4):
        bench.step()
    kept = bench.add("a")
    bench.run()
    assert bench.begun_in(lost, kept) == [kept, lost]


def test_a_request_may_have_an_objective_of_its_own() -> None:
    bench = Bench(max_running=1)
    bench.add(output=6)
    bench.step()
    lost, free = bench.add(slo_ttft_s=1.0), bench.add()
    for _ in range(4):
        bench.step()
    bench.run()
    assert bench.begun_in(lost, free) == [free, lost]


def test_a_request_whose_objective_is_lost_does_not_starve() -> None:
    bench = Bench([TenantPolicy(name="a", slo_ttft=2.0)], max_running=1)
    bench.add("a")
    bench.step()
    lost = bench.add("a")
    bench.clock.advance(3.0)
    for _ in range(40):
        bench.add("a")  # each can still be served in time
        bench.step()
    assert lost in bench.begun


# ---- what is charged


def test_a_prompt_is_charged_when_it_begins_and_an_answer_token_by_token() -> None:
    bench = Bench(max_running=1)
    bench.add("b", output=1)
    bench.run()
    bench.add("a", prompt=10, output=5)
    bench.step()
    fair, before = bench.scheduler.fair, bench.scheduler.fair.counter("b")
    assert fair.counter("a") == before + 10
    bench.run()
    assert fair.counter("a") == before + 10 + 2 * 5


def test_what_is_computed_again_after_a_preemption_is_not_charged_again() -> None:
    bench = Bench(num_blocks=7, max_running=2)
    bench.add("b", output=1)
    bench.run()
    level = bench.scheduler.fair.counter("b")
    for _ in range(2):
        bench.add("a", prompt=8, output=12)
    bench.run()
    assert bench.preempted
    assert bench.scheduler.fair.counter("a") == level + 2 * (8 + 2 * 12)


def test_a_request_costs_more_with_a_larger_adapter_and_for_its_load() -> None:
    model = cost_model()
    costs = RequestCosts(DriftWatch(model), {"small": 1 << 20, "large": 1 << 26}.__getitem__)
    for cost in (
        lambda version: costs.prompt(version, 100),
        lambda version: costs.output(version, 10, 100),
    ):
        assert 0 < cost(None) < cost("small") < cost("large")
    assert 0 < costs.load("small") < costs.load("large")
    assert costs.prompt(None, 200) == pytest.approx(2 * costs.prompt(None, 100), rel=0.5)
    assert costs.output(None, 10, 1000) >= costs.output(None, 10, 10)


def test_costs_follow_the_corrections_of_the_cost_model() -> None:
    watch = DriftWatch(cost_model())
    costs = RequestCosts(watch, {"v": 1 << 20}.__getitem__)
    before = costs.prompt("v", 100), costs.load("v")
    for kind in CostKind:
        while not watch.observe(kind, predicted_s=1.0, measured_s=3.0):
            pass
    assert (costs.prompt("v", 100), costs.load("v")) == pytest.approx([3 * each for each in before])


def test_a_load_is_charged_to_the_request_that_needs_it() -> None:
    memory = Arena(num_pages=40, page_bytes=4096, block_size=4, host_bytes=0)
    config = SchedulerConfig(max_model_len=64, work=StepWork(max_tokens=64))
    scheduler = Scheduler(config, memory, request_costs=DriftWatch(cost_model()))
    scheduler.adapters.add("v", 4096)
    ask = EngineRequest(
        request_id="0", prompt_token_ids=[1] * 4, params=SamplingParams(max_tokens=2), tenant="b"
    )
    scheduler.add(ask)
    scheduler.add(replace(ask, request_id="1", tenant="a", adapter="v"))
    scheduler.schedule()
    fair = scheduler.fair
    assert fair.counter("a") - fair.counter("b") == fair.costs.load("v") - fair.costs.prompt(None, 4)


# ---- who gives back memory


def test_the_tenant_that_holds_the_most_memory_is_preempted_first() -> None:
    bench = Bench(num_blocks=13, max_running=8)
    for _ in range(3):
        bench.add("many", prompt=8, output=30)
    bench.step()
    young = bench.add("few", prompt=8, output=8)
    while young not in bench.ended:
        bench.step()
    assert bench.preempted
    assert young not in bench.preempted


def test_of_one_tenant_the_request_of_the_highest_priority_is_preempted_first() -> None:
    bench = Bench(num_blocks=9, max_running=8)
    first = bench.add(prompt=8, output=12, priority=1)
    bench.add(prompt=8, output=12)
    bench.add(prompt=8, output=12)
    while not bench.preempted:
        bench.step()
    assert bench.preempted[0] == first


def test_two_tenants_with_one_request_each_do_not_preempt_each_other_in_turns() -> None:
    bench = Bench(num_blocks=10, max_running=8)
    for tenant in ("a", "b"):
        bench.add(tenant, prompt=12, output=20)
    bench.run()
    assert len(set(bench.preempted)) == 1


# ---- lines of batches


def test_lines_of_batches_come_after_the_live_requests_of_every_tenant() -> None:
    bench = Bench(max_running=1)
    bench.add("other")
    line = bench.add("few", priority=BATCH_PRIORITY)
    live = [bench.add("many") for _ in range(4)]
    bench.run()
    assert bench.begun_in(line, *live)[-1] == line


def test_a_line_that_runs_gives_its_place_to_a_live_request_and_goes_on_later() -> None:
    bench = Bench(max_running=2)
    lines = [bench.add("a", output=20, priority=BATCH_PRIORITY) for _ in range(2)]
    bench.step()
    bench.step()
    live = bench.add("b", output=3)
    bench.step()
    assert bench.preempted == [lines[1]], "the youngest, and no more than there are live requests"
    assert live in bench.begun
    bench.run()
    assert bench.ended == [live, *lines]


def test_a_line_gives_its_memory_to_a_live_request() -> None:
    bench = Bench(max_running=8, num_blocks=10)
    lines = [bench.add("a", prompt=16, output=4, priority=BATCH_PRIORITY) for _ in range(2)]
    bench.step()
    live = bench.add("b", prompt=16, output=4)
    bench.step()
    assert live in bench.begun
    assert bench.preempted == [lines[1]]
    bench.run()
    assert sorted(bench.ended) == sorted([live, *lines])


def test_no_line_gives_way_to_what_would_be_short_of_memory_anyway() -> None:
    bench = Bench(max_running=2, num_blocks=14)
    bench.add("b", prompt=36, output=4)
    line = bench.add("a", prompt=4, output=9, priority=BATCH_PRIORITY)
    bench.step()
    live = bench.add("b", prompt=36, output=4)
    for _ in range(3):
        bench.step()
    assert live not in bench.begun
    assert not bench.preempted
    bench.run()
    assert line in bench.ended


def test_lines_give_way_only_to_requests_that_begin_in_that_step() -> None:
    """The tenant `many` may run one request more than it does, and each step has room for few prompts."""
    bench = Bench(max_running=20, max_borrowing=0.0, num_blocks=2000)
    for _ in range(20):
        bench.add("lines", output=50, priority=BATCH_PRIORITY)
    bench.step()
    for _ in range(60):
        bench.add("many", output=20)
    for number in range(60):
        if number % 3 == 0:
            bench.add("one", output=5)
        num_begun = len(bench.begun)
        plan = bench.step()
        assert len(plan.preempted) <= len(bench.begun) - num_begun
    assert bench.preempted


def test_lines_keep_their_places_while_a_step_has_no_room_for_more_prompts() -> None:
    bench = Bench(max_running=20, num_blocks=2000, max_model_len=600)
    for _ in range(20):
        bench.add("lines", output=500, priority=BATCH_PRIORITY)
    bench.step()
    bench.step()
    for _ in range(20):
        bench.add("live", prompt=500, output=5)
    for _ in range(10):
        plan = bench.step()
        assert len(plan.preempted) <= 1
        assert len(plan.chunks) >= 18
    assert bench.preempted


def test_a_line_of_a_tenant_served_before_another_gives_it_nothing() -> None:
    bench = Bench([TenantPolicy(name="later", priority=1)], max_running=1)
    line = bench.add("a", output=9, priority=BATCH_PRIORITY)
    bench.step()
    bench.add("later")
    bench.run()
    assert not bench.preempted
    assert bench.ended[0] == line


def test_a_live_request_takes_no_place_from_a_live_one_of_a_higher_priority() -> None:
    bench = Bench(max_running=1)
    bench.add("a", output=20, priority=5)
    bench.step()
    bench.add("a", output=2)
    bench.run()
    assert not bench.preempted


@pytest.mark.parametrize("batching", [Batching.MERGED, Batching.DYNAMIC])
def test_policies_that_displace_requests_displace_those_of_a_higher_priority(batching: Batching) -> None:
    bench = Bench(max_running=1, batching=batching)
    line = bench.add(output=20, priority=BATCH_PRIORITY)
    bench.step()
    live = bench.add(output=2)
    bench.run()
    assert bench.ended == [live, line]


# ---- the promises


@QUICK
@given(
    shares=st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2, max_size=4),
    batching=st.sampled_from([Batching.FCFS, Batching.GROUPED]),
    seed=st.integers(0, 1 << 20),
)
def test_the_service_of_tenants_that_wait_differs_by_no_more_than_vtc_proves(
    shares: list[float], batching: Batching, seed: int
) -> None:
    draw, max_running = random.Random(seed), 4
    tenants = [f"{letter}-" for letter in "abcd"[: len(shares)]]
    policies = [TenantPolicy(name=name, share=share) for name, share in zip(tenants, shares, strict=True)]
    bench = Bench(policies, max_running=max_running, batching=batching)
    fair = bench.scheduler.fair
    for tenant in tenants:
        for _ in range(60):
            bench.add(tenant, prompt=draw.randint(1, MAX_PROMPT), output=draw.randint(1, MAX_OUTPUT))
    prompt, output = fair.costs.prompt(None, MAX_PROMPT), fair.costs.output(None, MAX_OUTPUT, MAX_PROMPT)
    bound = 2 * (prompt + max_running * output) / min(shares)
    served = dict.fromkeys(tenants, 0.0)
    for _ in range(40):
        plan = bench.step()
        assert len(plan.chunks) == max_running, "a place is free while requests wait"
        for chunk in plan.chunks:
            tenant = chunk.request_id[:2]
            cost = fair.costs.prompt(None, len(chunk.token_ids)) if chunk.start == 0 else 0.0
            served[tenant] += (cost + fair.costs.output(None, 1, chunk.end)) / fair.share(tenant)
        waiting = bench.scheduler._waiting.tenants
        assert len(waiting) == len(tenants)
        assert max(served.values()) - min(served.values()) <= bound


@QUICK
@given(
    batching=st.sampled_from([Batching.FCFS, Batching.GROUPED, Batching.AUTO]), seed=st.integers(0, 1 << 20)
)
def test_no_request_starves_whatever_tenants_priorities_and_objectives_there_are(
    batching: Batching, seed: int
) -> None:
    draw = random.Random(seed)
    policies = [
        TenantPolicy(name="a", share=0.1, slo_ttft=3.0),
        TenantPolicy(name="b", share=9.0),
        TenantPolicy(name="c", priority=1),
    ]
    bench = Bench(policies, num_blocks=draw.randint(8, 30), max_running=draw.randint(1, 6), batching=batching)
    for version in ("v", "w"):
        bench.scheduler.adapters.add(version, 40)
    for _ in range(60):
        if draw.random() < 0.6:
            bench.add(
                draw.choice(["", "a", "b", "c"]),
                prompt=draw.randint(1, MAX_PROMPT),
                output=draw.randint(1, MAX_OUTPUT),
                priority=draw.choice([0, 0, 0, -1, 4, BATCH_PRIORITY]),
                slo_ttft_s=draw.choice([None, None, 2.0]),
                adapter=draw.choice([None, "v", "w"]),
            )
        if draw.random() < 0.1 and bench.scheduler.request_ids:
            bench.scheduler.cancel(draw.choice(sorted(bench.scheduler.request_ids)))
        bench.step()
    bench.run()
