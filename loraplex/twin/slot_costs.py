"""The costs of a slot engine's steps for compiled code: `SlotCosts` as named tuples with the same names."""

from __future__ import annotations

from dataclasses import asdict
from typing import NamedTuple

from loraplex.perf.slot_profile import SlotCosts


class DecodeCosts(NamedTuple):
    """The fields of `perf.serving_costs.BatchDecode`."""

    base_s: float
    request_s: float
    adapter_s: float
    adapter_rank_s: float
    kv_token_s: float
    slot_s: float
    slot_rank_s: float
    request_rank_s: float
    request_adapter_s: float
    request_slot_s: float


class PrefillCosts(NamedTuple):
    """The fields of `perf.serving_costs.Prefill`."""

    base_s: float
    token_s: float
    adapter_s: float
    token_rank_s: float
    slot_s: float


class LoadCosts(NamedTuple):
    """The fields of `perf.serving_costs.AdapterLoadCost`."""

    slot_s: float
    slot_rank_s: float
    disk_s: float
    disk_rank_s: float


class SchedulerCosts(NamedTuple):
    """The fields of `perf.serving_costs.SchedulerCost`."""

    request_s: float
    waiting_s: float


class StepCosts(NamedTuple):
    """All costs of a step."""

    decode: DecodeCosts
    prefill: PrefillCosts
    load: LoadCosts
    scheduler: SchedulerCosts


def compiled_costs(costs: SlotCosts) -> StepCosts:
    """Return the costs for compiled code, which needs every value to be a float."""
    return StepCosts(
        decode=DecodeCosts(**_floats(costs.decode)),
        prefill=PrefillCosts(**_floats(costs.prefill)),
        load=LoadCosts(**_floats(costs.load)),
        scheduler=SchedulerCosts(**_floats(costs.scheduler)),
    )


def _floats(part: object) -> dict[str, float]:
    return {name: float(value) for name, value in asdict(part).items()}  # type: ignore[call-overload]
