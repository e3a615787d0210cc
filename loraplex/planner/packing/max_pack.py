"""The digital-twin paper's greedy packing (its Algorithms 1 and 2).

Each GPU is filled up to Max_pack, the most that it serves without starvation, before the next one is opened.
Whether it starves is asked only at testing points; what was added since the last good one goes back to the
front of the queue if it does, and the GPU is closed. So one GPU is open at a time, and a GPU's content does
not depend on how many there are.

At each test Algorithm 2 compares the present number of slots with the next in the list, and takes the one
with the higher predicted throughput; starvation is judged for that one alone.

Where the paper's pseudo-code raises, this follows the authors' program, and goes further in one case:

- The last test of a GPU comes before its next testing point if the queue ends there. The program fills the
  adapters up to that point with more of the mean rate and the smallest size, which errs on the safe side; so
  does this, and the adapters themselves must be judged good as well.
- If the last test fails, pseudo-code raises, and the program tries another GPU; so does this.
- If a GPU starves at its first test, both give up, as every other GPU would. This tries half as
  many adapters, down to one, and gives up only on an adapter that starves a GPU alone.
- From 576 adapters on, testing points are further apart. The program has none there.
- A GPU without slots has no testing points: the most adapters that it serves are found by halving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.judge import Judge
from loraplex.planner.packing.order import size_first_zigzag
from loraplex.planner.packing.packer import check_num_gpus, no_room_for_slots, starves_alone, too_few_gpus
from loraplex.planner.packing.testing_points import SLOT_COUNTS, each_testing_point, next_slot_count
from loraplex.planner.plan import GpuPlan
from loraplex.planner.queued import Queued

_HALVED: Final = (4, 2, 1)
"""Numbers of adapters to test a GPU at that starves at its first testing point, or before it."""


class _Filled(NamedTuple):
    """The adapters, from the front of the queue, that were found to fit a GPU, and its slots. `num_slots` is
    0 before the first test of a GPU with slots, and None for one without."""

    num_adapters: int
    num_slots: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxPack:
    """Fills one GPU after the other. `has_slots`: whether the engine has slots for adapters; without them
    there are none to choose, and only the judge limits a GPU."""

    judge: Judge
    has_slots: bool = True

    def pack(self, demand: Demand, num_gpus: int) -> tuple[GpuPlan, ...]:
        """Return the plans, one for each GPU that is needed.

        It asks the judge twice a testing point at most. It goes on when the GPUs are used up, to say how many
        would do."""
        check_num_gpus(num_gpus)
        queue = Queued(size_first_zigzag(demand.adapters))
        plans: list[GpuPlan] = []
        start = 0
        while start < len(queue):
            filled = self._fill(queue, start)
            if not filled.num_adapters:
                raise self._not_served(queue[start], demand)
            end = start + filled.num_adapters
            plans.append(GpuPlan(adapters=tuple(queue[start:end]), num_slots=filled.num_slots))
            start = end
        if len(plans) > num_gpus:
            num_left = sum(len(each.adapters) for each in plans[num_gpus:])
            raise too_few_gpus(num_gpus, num_left, len(queue), plans)
        return tuple(plans)

    def _fill(self, queue: Queued, start: int) -> _Filled:
        """Fill one GPU from the queue; with none if not even the first adapter can be served."""
        if not self.has_slots:
            return self._fill_by_halves(queue, start)
        filled = empty = _Filled(0, 0)
        num_queued = len(queue) - start
        for point in each_testing_point():
            if point > num_queued:
                if num_queued > filled.num_adapters:
                    filled = self._test_last(queue[start:], point, filled) or filled
                break
            tested = self._test(queue[start : start + point], filled)
            if tested is None:
                break
            filled = tested
        if filled.num_adapters:
            return filled
        for num_adapters in _HALVED:
            if num_adapters <= num_queued:
                tested = self._test(queue[start : start + num_adapters], empty)
                if tested is not None:
                    return tested
        return empty

    def _fill_by_halves(self, queue: Queued, start: int) -> _Filled:
        """Fill a GPU without slots with as many as it serves. Without slots to choose, testing points would
        only leave room at the end of each."""
        good, bad = 0, None
        tried = SLOT_COUNTS[0]
        while bad is None or bad - good > 1:
            tried = min(tried, len(queue) - start)
            if self.judge.judge(queue[start : start + tried], None).is_starved:
                bad = tried
            else:
                good = tried
                if start + good == len(queue):
                    break
            tried = 2 * good if bad is None else (good + bad) // 2
        return _Filled(good, None)

    def _test(self, adapters: Sequence[AdapterDemand], filled: _Filled) -> _Filled | None:
        """Return the GPU with these adapters and the better of two numbers of slots; None if it starves."""
        assert filled.num_slots is not None
        best, verdict = None, None
        if filled.num_slots:
            best, verdict = filled.num_slots, self.judge.judge(adapters, filled.num_slots)
        max_rank = adapters[0].rank  # They are ordered by rank.
        larger = next_slot_count(filled.num_slots, max_rank, self.judge)
        if larger is not None:
            with_larger = self.judge.judge(adapters, larger)
            if verdict is None or not verdict.throughput_tok_s > with_larger.throughput_tok_s:
                best, verdict = larger, with_larger
        return None if verdict is None or verdict.is_starved else _Filled(len(adapters), best)

    def _test_last(self, adapters: Sequence[AdapterDemand], point: int, filled: _Filled) -> _Filled | None:
        """Test the end of the queue as if it reached up to the testing point."""
        mean_rps = sum(each.rate_rps for each in adapters) / len(adapters)
        smallest = adapters[-1].rank
        filler = [
            AdapterDemand(name=f"filler {number}", rank=smallest, rate_rps=mean_rps)
            for number in range(point - len(adapters))
        ]
        tested = self._test([*adapters, *filler], filled)
        if tested is None or self.judge.judge(adapters, tested.num_slots).is_starved:
            return None
        return _Filled(len(adapters), tested.num_slots)

    def _not_served(self, adapter: AdapterDemand, demand: Demand) -> PlanError:
        if not self.has_slots:
            return starves_alone(adapter, demand, self.judge.judge([adapter], None))
        fewest = SLOT_COUNTS[0]
        if not self.judge.fits(adapter.rank, fewest):
            return no_room_for_slots(adapter, fewest)
        return starves_alone(adapter, demand, self.judge.judge([adapter], fewest))
