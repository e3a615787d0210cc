"""The protocol that every packer follows, and what they raise where a demand cannot be packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loraplex.core.words import plural
from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.judge import Judge, Verdict
from loraplex.planner.plan import GpuPlan


class NotEnoughGpusError(PlanError):
    """There are too few GPUs for the packer. `plans`: its plan for as many as would do, if the packer knows
    one; a packer that fills one GPU after the other has made it by then."""

    def __init__(self, message: str, *, plans: Sequence[GpuPlan] | None = None) -> None:
        super().__init__(message)
        self.plans = None if plans is None else tuple(plans)


class Packer(Protocol):
    """Divides adapters among GPUs of one kind, and chooses the slots of each."""

    def pack(self, demand: Demand, num_gpus: int) -> tuple[GpuPlan, ...]:
        """Return a plan for each GPU that gets adapters: `num_gpus` of them at most, none empty.

        Returns the same for the same demand. Raises PlanError if it finds no plan."""
        ...


def check_num_gpus(num_gpus: int) -> None:
    """Raise a PlanError if there is no GPU."""
    if num_gpus < 1:
        raise PlanError(f"{num_gpus} GPUs serve no adapter; give at least one")


def check_each(plans: Sequence[GpuPlan], demand: Demand, judge: Judge, num_gpus: int) -> None:
    """Raise a PlanError if a GPU starves. The fullest is judged first, as it is the likeliest to."""
    for plan in sorted(plans, key=lambda each: -demand.offered_tok_s(each.adapters)):
        verdict = judge.judge(plan.adapters, plan.num_slots)
        if verdict.is_starved:
            raise _starves_together(plan, demand, verdict, num_gpus)


def too_few_gpus(
    num_gpus: int, num_left: int, num_adapters: int, plans: Sequence[GpuPlan]
) -> NotEnoughGpusError:
    """Return the error for adapters that are left when all GPUs are full. `plans`: for as many GPUs as would
    do."""
    num_needed = len(plans)
    return NotEnoughGpusError(
        f"too few GPUs ({num_gpus}): there is no place for {num_left:,} of {num_adapters:,} "
        f"{plural('adapter', num_adapters)}; {num_needed} {plural('GPU', num_needed)} would do",
        plans=plans,
    )


def starves_alone(adapter: AdapterDemand, demand: Demand, verdict: Verdict) -> PlanError:
    """Return the error for an adapter that no GPU serves, even with no other beside it."""
    served_tok_s = verdict.throughput_tok_s
    if verdict.missed:
        return PlanError(
            f"adapter {adapter.name!r} misses the objective even alone on a GPU: "
            f"{' and '.join(verdict.missed)}; give a higher limit, lower its rate of {adapter.rate_rps:g} "
            "requests/s, or take faster GPUs"
        )
    if served_tok_s <= 0:
        return PlanError(
            f"adapter {adapter.name!r} (rank {adapter.rank}) is larger than a GPU has memory for beside "
            "requests; lower its rank, or take GPUs with more memory"
        )
    return PlanError(
        f"adapter {adapter.name!r} starves a GPU alone: its {adapter.rate_rps:g} requests/s are "
        f"{demand.offered_tok_s([adapter]):,.0f} tokens/s, and a GPU serves {served_tok_s:,.0f}; let "
        "several GPUs have copies of it (--packer dlora), lower its rate, or take faster GPUs"
    )


def no_room_for_slots(adapter: AdapterDemand, num_slots: int) -> PlanError:
    """Return the error for an adapter whose rank leaves no room even for the fewest slots."""
    return PlanError(
        f"adapter {adapter.name!r} (rank {adapter.rank}) is larger than a GPU has memory for: "
        f"{num_slots} {plural('slot', num_slots)} of its rank, the fewest that are considered, leave no room "
        "for requests; lower its rank, or take GPUs with more memory"
    )


def _starves_together(
    plan: GpuPlan, demand: Demand, verdict: Verdict, num_gpus: int
) -> PlanError | NotEnoughGpusError:
    """Return the error for a GPU that starves with the adapters that it was given."""
    if len(plan.adapters) == 1:
        return starves_alone(plan.adapters[0], demand, verdict)
    if verdict.missed:
        return NotEnoughGpusError(
            f"too few GPUs ({num_gpus}): one with {len(plan.adapters)} adapters misses the objective: "
            f"{' and '.join(verdict.missed)}; give more GPUs, or a higher limit"
        )
    slots = "" if plan.num_slots is None else f" in {plan.num_slots} slots"
    return NotEnoughGpusError(
        f"too few GPUs ({num_gpus}): one starves with {len(plan.adapters)} "
        f"adapters{slots}, whose requests are {demand.offered_tok_s(plan.adapters):,.0f} tokens/s, of which "
        f"it serves {verdict.throughput_tok_s:,.0f}; give more GPUs, or use a packer that chooses slots"
    )
