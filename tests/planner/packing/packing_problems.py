"""A judge that is easy to compute by hand, tiny demands, and the least number of GPUs by brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from loraplex.planner.demand import AdapterDemand, Demand
from loraplex.planner.judge import Verdict
from loraplex.planner.packing.testing_points import SLOT_COUNTS
from loraplex.planner.plan import GpuPlan

RANKS = (8, 16, 32)
RATES = (2.4, 1.2, 0.6, 0.3, 0.15, 0.0)


@dataclass
class CapacityJudge:
    """A GPU serves `capacity_tok_s`, less for each slot and rank that takes memory and each adapter that has
    to wait for a slot. More adapters never help, so neither capacity nor memory grows with them."""

    capacity_tok_s: float = 2400.0
    cost_of_slot: float = 0.02
    """Capacity that a slot of rank 1 takes."""
    cost_of_waiting: float = 20.0
    """Capacity that each adapter beyond the slots takes."""
    memory: int = 8000
    """Slots times ranks, or ranks without slots, that fit."""
    calls: list[tuple[int, int | None]] = field(default_factory=list)

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        self.calls.append((len(adapters), num_slots))
        offered = sum(each.rate_rps for each in adapters) * 100
        if num_slots is None:
            ranks = sum(each.rank for each in adapters)
            capacity, fits = self.capacity_tok_s - self.cost_of_slot * ranks, ranks <= self.memory
        else:
            max_rank = max(each.rank for each in adapters)
            waiting = max(len(adapters) - num_slots, 0)
            capacity = self.capacity_tok_s - self.cost_of_slot * num_slots * max_rank
            capacity -= self.cost_of_waiting * waiting
            fits = self.fits(max_rank, num_slots)
        throughput = min(offered, max(capacity, 0.0)) if fits else 0.0
        return Verdict(throughput, not fits or throughput < 0.9 * offered)

    def fits(self, max_rank: int, num_slots: int) -> bool:
        return max_rank * num_slots <= self.memory


def demand_of(*pairs: tuple[int, float]) -> Demand:
    """Return a demand of 100 tokens a request for adapters "0", "1", ... of these ranks and rates."""
    return Demand(
        adapters=tuple(
            AdapterDemand(name=str(number), rank=rank, rate_rps=rate)
            for number, (rank, rate) in enumerate(pairs)
        ),
        prompt_tokens=60,
        output_tokens=40,
    )


def demands(max_size: int) -> st.SearchStrategy[Demand]:
    pairs = st.tuples(st.sampled_from(RANKS), st.sampled_from(RATES))
    return st.lists(pairs, max_size=max_size).map(lambda each: demand_of(*each))


def judges() -> st.SearchStrategy[CapacityJudge]:
    return st.builds(
        CapacityJudge,
        capacity_tok_s=st.sampled_from([300.0, 700.0, 2400.0]),
        cost_of_slot=st.sampled_from([0.0, 0.02, 0.3]),
        cost_of_waiting=st.sampled_from([0.0, 20.0]),
        memory=st.sampled_from([256, 1024, 8000]),
    )


def check_holds_once(plans: Sequence[GpuPlan], demand: Demand, num_gpus: int) -> None:
    """Check that every adapter is on one GPU as it was given, and no GPU is empty or too many."""
    placed = [each for plan in plans for each in plan.adapters]
    assert sorted(placed, key=lambda each: each.name) == sorted(demand.adapters, key=lambda each: each.name)
    assert all(plan.adapters for plan in plans)
    assert len(plans) <= num_gpus


def check_good(plans: Sequence[GpuPlan], judge: CapacityJudge, *, has_slots: bool) -> None:
    """Check that no GPU starves, and that slots are from the list and fit."""
    for plan in plans:
        assert not judge.judge(plan.adapters, plan.num_slots).is_starved
        if has_slots:
            assert plan.num_slots in SLOT_COUNTS
            assert judge.fits(plan.max_rank, plan.num_slots)
        else:
            assert plan.num_slots is None


def fewest_gpus(demand: Demand, judge: CapacityJudge, *, has_slots: bool) -> int | None:
    """Return the least number of GPUs over all divisions of the adapters and all slots; None if none is
    good."""
    slots: tuple[int | None, ...] = (8, 16) if has_slots else (None,)

    def is_good(group: Sequence[AdapterDemand]) -> bool:
        return any(not judge.judge(group, each).is_starved for each in slots)

    return min(map(len, divisions(demand.adapters, is_good)), default=None)


def divisions(
    adapters: Sequence[AdapterDemand], is_good: Callable[[Sequence[AdapterDemand]], bool]
) -> Iterator[list[list[AdapterDemand]]]:
    """Yield all divisions of the adapters into good groups, relying on parts of good groups being good."""
    if not adapters:
        yield []
        return
    *others, last = adapters
    for groups in divisions(others, is_good):
        for number, group in enumerate(groups):
            if is_good([*group, last]):
                yield [*groups[:number], [*group, last], *groups[number + 1 :]]
        if is_good([last]):
            yield [*groups, [last]]
