"""Find the least number of GPUs that a packer needs."""

from __future__ import annotations

from loraplex.planner.demand import Demand, PlanError
from loraplex.planner.packing.packer import NotEnoughGpusError, Packer, check_num_gpus
from loraplex.planner.plan import GpuPlan


def least_gpus(packer: Packer, demand: Demand, most_gpus: int, *, at_least: int = 1) -> tuple[GpuPlan, ...]:
    """Return the packer's plan for the least number of GPUs for which it raises nothing. Raises what the
    packer raises for `most_gpus`, or for fewer where more GPUs are no help. `at_least`: fewer GPUs are known
    not to do.

    Numbers are doubled up to the first that will do, then bisected, so it is the least for packers that
    never fail with more GPUs than they succeed with. A packer that fills one GPU after the other is one, and
    packs once: its error for too few GPUs has the plan for as many as it needs. One that spreads
    adapters over all GPUs can, by chance, succeed with fewer GPUs than it fails with; of it is only certain
    that it fails with one less.
    """
    check_num_gpus(most_gpus)
    least, best = _first_that_will_do(packer, demand, most_gpus, at_least)
    while least < len(best):
        num_gpus = (least + len(best)) // 2
        try:
            best = packer.pack(demand, num_gpus)
        except PlanError:
            least = num_gpus + 1
    return best


def _first_that_will_do(
    packer: Packer, demand: Demand, most_gpus: int, at_least: int
) -> tuple[int, tuple[GpuPlan, ...]]:
    """Return the least number of GPUs that may do, and a plan for as many or more."""
    least = num_gpus = min(at_least, most_gpus)
    while True:
        try:
            return least, packer.pack(demand, num_gpus)
        except NotEnoughGpusError as error:
            if num_gpus == most_gpus:
                raise
            if error.plans is not None and len(error.plans) <= most_gpus:
                return len(error.plans), error.plans
            least = num_gpus + 1
            # What a packer raises for too many GPUs is about as many as there are.
            num_gpus = min(2 * num_gpus, most_gpus) if error.plans is None else most_gpus
