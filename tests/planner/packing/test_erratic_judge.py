"""Packers with a judge that is no function of load, as a trained model may be where it has seen little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st
from packing_problems import check_holds_once, demands

from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.judge import Verdict
from loraplex.planner.packing.improve import LocalImprovement
from loraplex.planner.packing.least_rate import LeastRate
from loraplex.planner.packing.max_pack import MaxPack


@dataclass
class ErraticJudge:
    """Draws each verdict from the names and slots. `good_share`: share of the verdicts that are good."""

    seed: int
    good_share: float

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        key = f"{self.seed} {num_slots} {sorted(each.name for each in adapters)}"
        drawn = crc32(key.encode()) / 2**32
        return Verdict(1000 * drawn, drawn >= self.good_share)

    def fits(self, max_rank: int, num_slots: int) -> bool:
        return True


@given(demands(40), st.integers(0, 99), st.sampled_from([0.3, 0.6, 0.9]), st.booleans())
def test_no_plan_exceeds_the_judge(demand: Demand, seed: int, good_share: float, has_slots: bool) -> None:
    judge = ErraticJudge(seed, good_share)
    greedy = MaxPack(judge=judge, has_slots=has_slots)
    spread = LeastRate(judge=judge, has_slots=has_slots)
    for packer in (greedy, spread, LocalImprovement(packer=greedy, judge=ErraticJudge(seed + 1, 0.5))):
        try:
            plans = packer.pack(demand, 20)
        except PlanError:
            continue
        check_holds_once(plans, demand, 20)
        assert not any(packer.judge.judge(each.adapters, each.num_slots).is_starved for each in plans)
