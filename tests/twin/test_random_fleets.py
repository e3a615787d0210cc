"""Random fleets, looked at after everything that happens in them: engines of either kind, every routing and
placement, migration, links and hosts that are full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from fleets import LINK, OPTIONS, check_all_served
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import TRUTH
from twins import imagined_machine, random_workload

from loraplex.fleet.migration import trigger
from loraplex.fleet.migration.migrate import Migrator
from loraplex.fleet.plan import Plan
from loraplex.fleet.policy import AUTO, EVERYWHERE, PLACEMENTS, ROUTINGS, Policy
from loraplex.perf.cost_model import with_padded_kernels
from loraplex.perf.named_profiles import Profile
from loraplex.twin import fleet_run
from loraplex.twin.fleet import FleetOutcome, SimulatedFleet
from loraplex.twin.fleet_run import FleetOptions, FleetRuns, shuffled
from loraplex.twin.links import LinkSpeed
from loraplex.twin.replay import ReplayOptions
from loraplex.twin.slo import Slo
from loraplex.workload.jsonl import WorkloadRequest

SLOT_OPTIONS = ReplayOptions(num_adapters=9, ranks=(8, 16, 64), kv_tokens=2400)
ADAPTER_BYTES = 80 << 20
POINTS = {8: 900.0, 16: 800.0, 64: 500.0}
Pair = tuple[int, int]
"""A replica and an adapter."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A fleet, its policy and its workload. `num_slots`: None for our own engine. `is_tight`: hosts hold
    hardly more than each adapter once."""

    policy: Policy
    num_replicas: int
    num_slots: int | None
    padded: bool
    link: LinkSpeed | None
    is_tight: bool
    seed: int
    rps: float

    @property
    def profile(self) -> Profile:
        if self.num_slots is not None:
            return TRUTH
        machine = imagined_machine()
        return with_padded_kernels(machine) if self.padded else machine

    @property
    def options(self) -> FleetOptions:
        own = replace(OPTIONS, host_memory=self._host_bytes)
        return FleetOptions(
            num_replicas=self.num_replicas,
            replay=own if self.num_slots is None else replace(SLOT_OPTIONS, num_slots=self.num_slots),
            slo=Slo(tpt_s=0.02),
            period_s=0.3,
            points=POINTS,
            link=self.link,
            adapter_bytes=None if self.num_slots is None else ADAPTER_BYTES,
        )

    @property
    def _host_bytes(self) -> int | None:
        sizes = [rank << 20 for rank in (8, 16, 64) * 3]
        return sum(sizes) // self.num_replicas + max(sizes) if self.is_tight else None

    @property
    def keeps_to_the_plan(self) -> bool:
        """Requests are only ever sent to replicas that their adapter is placed on."""
        return self.policy.routing != AUTO and not self.policy.migrates


@st.composite
def fleets(draw: st.DrawFn) -> Drawn:
    num_slots = draw(st.one_of(st.none(), st.integers(1, 9)))
    placements = [
        name
        for name, named in PLACEMENTS.items()
        if num_slots is None or named is None or not named.needs_device_bytes
    ]
    routing, placement = draw(st.sampled_from(ROUTINGS)), draw(st.sampled_from(placements))
    return Drawn(
        policy=Policy.of(routing, placement, migrates=draw(st.booleans())),
        num_replicas=draw(st.sampled_from([3, 2, 4, 1])),
        num_slots=num_slots,
        padded=draw(st.booleans()),
        link=draw(st.sampled_from([LINK, LinkSpeed(bytes_per_s=2e8), None])),
        is_tight=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        rps=draw(st.sampled_from([20.0, 80.0, 500.0])),
    )


class CheckedFleet(SimulatedFleet):
    """Looks at the fleet after everything that happens. `num_allowed`: by replica and adapter, how many
    fetches the plans so far have called for."""

    def watch(self, drawn: Drawn) -> None:
        self.drawn = drawn
        self.plans: list[Plan] = []
        self.num_fetched: Counter[Pair] = Counter()
        self.num_allowed: Counter[Pair] = Counter()

    def _run_to(self, now_s: float) -> None:
        super()._run_to(now_s)
        self._controller.view.load.check_integrity()
        self._check()

    def _collect(self, chosen: int, wake_s: float) -> None:
        super()._collect(chosen, wake_s)
        self._check()

    def _fetch_end_s(self, chosen: int, version: str) -> float:
        adapter, pool = self._adapters.adapter_number(version), self._controller.pool
        assert pool is not None
        self._take_plan()
        if not pool.has(chosen, adapter):
            self.num_fetched[chosen, adapter] += 1
            assert chosen in self._controller.view.load.in_flight(adapter), "nobody asked for it"
            if self.drawn.keeps_to_the_plan and not self.drawn.is_tight:
                assert self.num_fetched[chosen, adapter] <= self.num_allowed[chosen, adapter]
        end_s = super()._fetch_end_s(chosen, version)
        pool.check_integrity()
        return end_s

    def _check(self) -> None:
        self._take_plan()
        pool = self._controller.pool
        if pool is None:
            return
        pool.check_integrity()
        for adapter in range(OPTIONS.num_adapters):
            there = {
                replica
                for replica in range(self.drawn.num_replicas)
                if pool.has(replica, adapter) or pool.is_fetching(replica, adapter)
            }
            assert self._controller.view.tiers.on_host(adapter) == there, (
                "what routers are told is what the directory has"
            )

    def _take_plan(self) -> None:
        """Count what the plan moves, if it is another one."""
        plan = self._controller.view.plan
        num_replicas, num_adapters = self.drawn.num_replicas, OPTIONS.num_adapters
        if plan is None:
            assert self.drawn.policy.placement == EVERYWHERE
            pairs = [(replica, adapter) for replica in range(num_replicas) for adapter in range(num_adapters)]
            self.num_allowed = Counter(pairs)
            return
        if self.plans and plan is self.plans[-1]:
            return
        assert len(plan.replicas) == num_adapters
        assert [sum(shares) for shares in plan.shares] == pytest.approx([1.0] * num_adapters)
        load = self._controller.view.load
        for adapter, named in enumerate(plan.replicas):
            before = self.plans[-1].replicas[adapter] if self.plans else named  # at first all are there
            moved_to = set(named) - set(before)
            left_behind = (set(before) - set(named)) & set(load.in_flight(adapter))
            self.num_allowed.update((replica, adapter) for replica in moved_to | left_behind)
        self.plans.append(plan)


def simulated(
    drawn: Drawn, workload: Sequence[WorkloadRequest], checked: list[CheckedFleet] | None = None
) -> FleetOutcome:
    """Run a workload with migration that looks often and moves early. `checked`: gets the fleet, which is
    looked at meanwhile; None to let it run by itself."""

    def make(*args: Any, **options: Any) -> SimulatedFleet:
        if checked is None:
            return SimulatedFleet(*args, **options)
        checked.append(CheckedFleet(*args, **options))
        checked[-1].watch(drawn)
        return checked[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_run, "SimulatedFleet", make)
        patch.setattr(fleet_run, "Migrator", lambda: Migrator(period_s=0.2))
        patch.setattr(trigger, "REQUESTS_ABOVE_MEAN", 1.0)
        return FleetRuns(drawn.profile, workload, drawn.options).run(drawn.policy, drawn.seed % 3)


@settings(max_examples=15, deadline=None)
@given(drawn=fleets())
def test_random_fleets_lose_nothing_and_repeat_themselves(drawn: Drawn) -> None:
    workload = random_workload(drawn.seed, num_requests=40, num_adapters=9, rps=drawn.rps)
    checked: list[CheckedFleet] = []
    first, second = simulated(drawn, workload, checked), simulated(drawn, workload)
    check_all_served(first, list(shuffled(workload, drawn.seed % 3)))
    assert list(first.all.requests) == list(second.all.requests)
    assert list(first.chosen) == list(second.chosen)
    assert (first.bytes_moved, first.num_moves) == (second.bytes_moved, second.num_moves)
    assert sum(checked[0].num_fetched.values()) == (
        0 if drawn.link is None else sum(each.num_fetches for each in first.replicas)
    )
