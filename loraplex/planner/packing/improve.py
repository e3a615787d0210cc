"""Our own packing: another packer's plan, improved by moves that a judge allows.

The plan may come from a quick judge, and be improved with a slower and better one:

1. Repair: a GPU that starves keeps what it serves of its adapters; the others go to GPUs with room, or to new
   ones.
2. Fewer GPUs: the adapters of one of the least loaded GPUs are spread over the others, if these take all.
3. Even division: all adapters are divided anew, so that all GPUs are alike, if fewer GPUs will then do or
   the highest rate gets lower.
4. Lowest worst load: adapters move from the GPU with the highest rate to one of those with the lowest, or are
   swapped for others with a lower rate.

Each GPU that a step changes is judged, and the step is taken only if none starves. So the plan never gets
worse, and stopping at any time leaves one that is good.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.judge import Judge
from loraplex.planner.packing.even import divided, evenly
from loraplex.planner.packing.order import size_first_zigzag
from loraplex.planner.packing.packer import (
    NotEnoughGpusError,
    Packer,
    check_num_gpus,
    no_room_for_slots,
    starves_alone,
    too_few_gpus,
)
from loraplex.planner.packing.testing_points import SLOT_COUNTS
from loraplex.planner.plan import GpuPlan
from loraplex.planner.queued import Queued

_MOST_DONORS: Final = 3
"""GPUs that are tried to empty, the least loaded first, before there is no hope for fewer GPUs."""
_MOST_REFUSALS: Final = 8
"""Single adapters that a GPU refuses before it is taken for full."""
_MOST_RECEIVERS: Final = 3
"""GPUs, the least loaded first, that may relieve the one with the highest rate."""
_EQUAL_SHARE: Final = 0.02
"""Difference of two GPUs' rates, relative to the higher, that is not worth a move."""

_Pairs = list[tuple[AdapterDemand, AdapterDemand]]
"""Adapters of one GPU, each with one of another GPU to swap it for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalImprovement:
    """Improves the plans of another packer. `judge`: may be another one than the packer's; `most_judgements`:
    times that it is asked at most, beyond those that repair and even divisions take, of which the last step
    may use a few more. `divides_evenly`: whether even divisions are tried. All of their GPUs are full if
    they are fewer, so that they are for a judge that is not improved on by another one afterwards."""

    packer: Packer
    judge: Judge
    most_judgements: int = 1000
    divides_evenly: bool = True

    def pack(self, demand: Demand, num_gpus: int) -> tuple[GpuPlan, ...]:
        """Return the improved plan. The other packer may need more GPUs than there are, if it has a plan for
        these.

        Raises PlanError if too many GPUs are needed even so, or an adapter starves a GPU alone."""
        check_num_gpus(num_gpus)
        try:
            plans = self.packer.pack(demand, num_gpus)
        except NotEnoughGpusError as error:
            if error.plans is None:
                raise
            plans = error.plans
        improved = improve(
            plans,
            demand,
            self.judge,
            most_judgements=self.most_judgements,
            divides_evenly=self.divides_evenly,
        )
        if len(improved) > num_gpus:
            loads = sorted(len(each.adapters) for each in improved)
            num_left = sum(loads[: len(loads) - num_gpus])
            raise too_few_gpus(num_gpus, num_left, len(demand.adapters), improved)
        return improved


def improve(
    plans: Sequence[GpuPlan],
    demand: Demand,
    judge: Judge,
    *,
    most_judgements: int = 1000,
    divides_evenly: bool = True,
) -> tuple[GpuPlan, ...]:
    """Return a plan with as many GPUs or fewer, or with the same number and a lower highest rate, if one is
    found. Only a plan that starves GPUs, by this judge, may need more. `divides_evenly`: see
    `LocalImprovement`.

    Each adapter is on one GPU of the plan only. Raises PlanError if an adapter starves a GPU alone."""
    names = [each.name for plan in plans for each in plan.adapters]
    assert len(set(names)) == len(names), "a plan with copies is not improved"
    search = _Search(plans, judge, most_judgements)
    search.repair(demand)
    while search.has_judgements and search.remove_a_gpu():
        pass
    if divides_evenly:
        search.divide_evenly(demand.request_tokens)
    while search.has_judgements and search.relieve_the_fullest():
        pass
    return tuple(
        GpuPlan(adapters=tuple(each.adapters), num_slots=each.num_slots)
        for each in search.gpus
        if each.adapters
    )


class _Gpu:
    """A GPU as packed so far. A changed one is a new object, so that trying leaves the present one alone."""

    def __init__(self, adapters: Iterable[AdapterDemand], num_slots: int | None) -> None:
        self.adapters = adapters if isinstance(adapters, Queued) else Queued(adapters)
        self.num_slots = num_slots
        self.rate_rps = sum(self.adapters.columns.rates_rps)
        self.max_rank = self.adapters.max_rank


class _Search:
    """The present plan, and the steps that improve it."""

    def __init__(self, plans: Sequence[GpuPlan], judge: Judge, most_judgements: int) -> None:
        self.gpus = [_Gpu(each.adapters, each.num_slots) for each in plans]
        self._judge = judge
        self._judgements_left = most_judgements

    @property
    def has_judgements(self) -> bool:
        return self._judgements_left > 0

    def repair(self, demand: Demand) -> None:
        """Make every GPU one that the judge finds good, with more GPUs if need be."""
        left_before = self._judgements_left
        unplaced: list[AdapterDemand] = []
        for number, gpu in enumerate(self.gpus):
            good = self._with_slots(gpu.adapters, gpu.num_slots)
            if good is None:
                empty = _Gpu([], gpu.num_slots)
                good, refused = self._filled(empty, size_first_zigzag(gpu.adapters))
                unplaced += refused
            self.gpus[number] = good
        unplaced = size_first_zigzag(unplaced)
        for number, gpu in enumerate(self.gpus):
            if not unplaced:
                break
            self.gpus[number], unplaced = self._filled(gpu, unplaced)
        first_slots = self._first_slots()
        while unplaced:
            filled = [self._filled(_Gpu([], number), unplaced) for number in first_slots]
            gpu, refused = min(filled, key=lambda each: len(each[1]))
            if not gpu.adapters:
                raise self._not_served(unplaced[0], demand, first_slots[0])
            self.gpus.append(gpu)
            unplaced = refused
        self.gpus = [each for each in self.gpus if each.adapters]
        self._judgements_left = left_before

    def _first_slots(self) -> list[int | None]:
        """Return numbers of slots to begin a new GPU with, the fewest first."""
        planned = [each.num_slots for each in self.gpus if each.num_slots is not None]
        return [*sorted({SLOT_COUNTS[0], *planned[:1], *planned[-1:]})] if planned else [None]

    def _not_served(self, adapter: AdapterDemand, demand: Demand, num_slots: int | None) -> PlanError:
        if num_slots is not None and not self._judge.fits(adapter.rank, num_slots):
            return no_room_for_slots(adapter, num_slots)
        return starves_alone(adapter, demand, self._judge.judge([adapter], num_slots))

    def remove_a_gpu(self) -> bool:
        """Spread the adapters of a GPU over the others. Return False if none of the tried can be emptied."""
        return any(
            self.has_judgements and self._empty(donor)
            for donor in sorted(self.gpus, key=_rate)[: min(_MOST_DONORS, len(self.gpus) - 1)]
        )

    def divide_evenly(self, request_tokens: float) -> None:
        """Divide all adapters anew, among as few GPUs as will do; among as many as there are only if that
        lowers the highest rate."""
        adapters = [each for gpu in self.gpus for each in gpu.adapters]
        has_slots = any(gpu.num_slots is not None for gpu in self.gpus)
        judge, num_gpus, best = self._judge, len(self.gpus), None
        for fewer in range(num_gpus - 1, 0, -1):
            found = evenly(divided(adapters, fewer), judge, request_tokens, has_slots=has_slots)
            if found is None:
                break
            best = found
        if best is None and num_gpus > 1:
            parts = divided(adapters, num_gpus)
            highest_rps = sum(parts[0].columns.rates_rps)
            if highest_rps < (1 - _EQUAL_SHARE) * max(map(_rate, self.gpus)):
                best = evenly(parts, judge, request_tokens, has_slots=has_slots)
        if best is not None:
            self.gpus = [_Gpu(each.adapters, each.num_slots) for each in best]

    def relieve_the_fullest(self) -> bool:
        """Lower the rate of the GPU with the highest. Return False if no move or swap is found."""
        if len(self.gpus) < 2:
            return False
        *receivers, fullest = sorted(self.gpus, key=_rate)
        for receiver in receivers[:_MOST_RECEIVERS]:
            if fullest.rate_rps - receiver.rate_rps <= _EQUAL_SHARE * fullest.rate_rps:
                return False
            if self._move(fullest, receiver) or self._swap(fullest, receiver):
                return True
        return False

    def _empty(self, donor: _Gpu) -> bool:
        """Move all adapters of the donor to other GPUs, or none."""
        left = size_first_zigzag(donor.adapters)
        changed: dict[int, _Gpu] = {}
        # GPUs with larger ranks first: they get the larger adapters, which cost the others most.
        receivers = [number for number, gpu in enumerate(self.gpus) if gpu is not donor]
        receivers.sort(key=lambda number: (-self.gpus[number].max_rank, self.gpus[number].rate_rps))
        for number in receivers:
            if not self.has_judgements:
                return False
            changed[number], left = self._filled(self.gpus[number], left)
            if not left:
                kept = [changed.get(each, gpu) for each, gpu in enumerate(self.gpus) if gpu is not donor]
                self.gpus = kept
                return True
        return False

    def _filled(self, gpu: _Gpu, offered: Sequence[AdapterDemand]) -> tuple[_Gpu, list[AdapterDemand]]:
        """Return the GPU with those of the offered adapters that it takes, and the others in their order.

        Adapters are offered in runs: all of them, the first half of a run that is refused, and a longer run
        after one that is taken. If one is refused alone, those with at least its rank and rate are not
        offered, as they cost at least as much."""
        rest = Queued(offered)
        taken: set[str] = set()
        num_refusals, run_length = 0, len(rest)
        refused_length: int | None = None  # A run of so many, from the front, is known to be refused.
        while rest and num_refusals < _MOST_REFUSALS:
            run = rest[:run_length]
            grown = None
            if refused_length != 1:
                grown = self._with_slots(gpu.adapters + run, gpu.num_slots)
            if grown is not None:
                gpu = grown
                taken.update(each.name for each in run)
                rest = rest[len(run) :]
                if refused_length is None:
                    run_length = 2 * len(run)
                else:
                    refused_length -= len(run)
                    run_length = max(refused_length // 2, 1)
            elif len(run) > 1:
                refused_length = len(run)
                run_length = len(run) // 2
            else:
                num_refusals += 1
                rank, rate_rps = run[0].rank, run[0].rate_rps
                rest = Queued(each for each in rest if each.rank < rank or each.rate_rps < rate_rps)
                refused_length, run_length = None, 1
        return gpu, [each for each in offered if each.name not in taken]

    def _move(self, fullest: _Gpu, receiver: _Gpu) -> bool:
        """Move adapters with up to half the difference of the rates, none of a rank that is new there."""
        gap_rps = fullest.rate_rps - receiver.rate_rps
        movable = sorted(
            (
                each
                for each in fullest.adapters
                if each.rank <= receiver.max_rank and 0 < each.rate_rps < gap_rps
            ),
            key=lambda each: (-each.rate_rps, each.name),
        )
        chosen: list[AdapterDemand] = []
        room_rps = gap_rps / 2
        for each in movable:
            if each.rate_rps <= room_rps:
                chosen.append(each)
                room_rps -= each.rate_rps
        if not chosen and movable:
            chosen = [movable[-1]]  # More than half the difference, but less than all of it.
        while chosen and self.has_judgements:
            if self._exchange(fullest, chosen, receiver, []):
                return True
            chosen = chosen[(len(chosen) + 1) // 2 :]
        return False

    def _swap(self, fullest: _Gpu, receiver: _Gpu) -> bool:
        """Swap adapters, so that up to half the difference of the GPUs' rates moves."""
        given = [each for each in fullest.adapters if each.rank <= receiver.max_rank]
        taken = [each for each in receiver.adapters if each.rank <= fullest.max_rank]
        given.sort(key=lambda each: (-each.rate_rps, each.name))
        taken.sort(key=lambda each: (each.rate_rps, each.name))
        gap_rps = fullest.rate_rps - receiver.rate_rps
        pairs = _pairs_within(given, taken, gap_rps / 2) or _closest_pair(given, taken, gap_rps)
        while pairs and self.has_judgements:
            if self._exchange(fullest, [pair[0] for pair in pairs], receiver, [pair[1] for pair in pairs]):
                return True
            pairs = pairs[(len(pairs) + 1) // 2 :]
        return False

    def _exchange(
        self, fullest: _Gpu, given: Sequence[AdapterDemand], receiver: _Gpu, taken: Sequence[AdapterDemand]
    ) -> bool:
        """Exchange adapters between two GPUs, if both are then good."""
        loaded = self._with_slots(_without(receiver.adapters, taken, and_with=given), receiver.num_slots)
        if loaded is None:
            return False
        relieved = self._with_slots(_without(fullest.adapters, given, and_with=taken), fullest.num_slots)
        if relieved is None:
            return False
        changed = {id(fullest): relieved, id(receiver): loaded}
        self.gpus = [changed.get(id(each), each) for each in self.gpus]
        return True

    def _with_slots(self, adapters: Queued, num_slots: int | None) -> _Gpu | None:
        """Return the GPU with these adapters and about so many slots; None if it starves."""
        if num_slots is None:
            return _Gpu(adapters, None) if self._is_good(adapters, None) else None
        for number in self._slots_near(num_slots, adapters):
            if self._is_good(adapters, number):
                return _Gpu(adapters, number)
        return None

    def _slots_near(self, num_slots: int, adapters: Queued) -> list[int]:
        """Return numbers of slots that fit: this one, the next if adapters would use it, the one before."""
        max_rank = adapters.max_rank
        above = bisect_right(SLOT_COUNTS, num_slots)
        tried = [num_slots]
        if num_slots < len(adapters):
            tried += SLOT_COUNTS[above : above + 1]
        fitting = [each for each in tried if self._judge.fits(max_rank, each)]
        smaller = reversed(SLOT_COUNTS[: bisect_left(SLOT_COUNTS, num_slots)])
        below = next((each for each in smaller if self._judge.fits(max_rank, each)), None)
        return fitting if below is None else [*fitting, below]

    def _is_good(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> bool:
        self._judgements_left -= 1
        return not self._judge.judge(adapters, num_slots).is_starved


def _rate(gpu: _Gpu) -> float:
    return gpu.rate_rps


def _pairs_within(given: Sequence[AdapterDemand], taken: Sequence[AdapterDemand], room_rps: float) -> _Pairs:
    """Return pairs to swap, the first given with the first taken and so on, that move no more than this."""
    pairs: _Pairs = []
    for pair in zip(given, taken, strict=False):
        difference_rps = pair[0].rate_rps - pair[1].rate_rps
        if 0 < difference_rps <= room_rps:
            pairs.append(pair)
            room_rps -= difference_rps
    return pairs


def _closest_pair(given: Sequence[AdapterDemand], taken: Sequence[AdapterDemand], gap_rps: float) -> _Pairs:
    """Return the pair whose difference is closest to half the gap, if it is less than all of it. `taken` is
    ordered by rate."""
    rates = [each.rate_rps for each in taken]
    best: _Pairs = []
    best_miss_rps = gap_rps / 2
    for each in given:
        near = bisect_left(rates, each.rate_rps - gap_rps / 2)
        for other in taken[max(near - 1, 0) : near + 1]:
            miss_rps = abs(each.rate_rps - other.rate_rps - gap_rps / 2)
            if miss_rps < best_miss_rps:
                best, best_miss_rps = [(each, other)], miss_rps
    return best


def _without(
    adapters: Sequence[AdapterDemand], removed: Sequence[AdapterDemand], *, and_with: Sequence[AdapterDemand]
) -> Queued:
    names = {each.name for each in removed}
    return Queued([*(each for each in adapters if each.name not in names), *and_with])
