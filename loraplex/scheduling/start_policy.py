"""The start policy: it decides what a request does whose adapter is not on the device.

It decides whether a request joins a step while its adapter is still being copied: each layer of such a step
waits for its own weights. Joining delays the others in the step; not joining delays the request itself. And
it decides how many of an adapter's first layers CPU workers compute meanwhile. How many workers there are is
decided in `cpu_workers`. Measured times of steps and copies correct the costs that it decides by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.core.cold_start import ColdStart
from loraplex.perf.cost_model import CostKind, CostModel
from loraplex.perf.drift import DriftWatch
from loraplex.perf.graph_limits import MAX_GRAPH_ROWS
from loraplex.perf.layer_pipeline import AssistPlan
from loraplex.perf.step_cost import StepFeatures

_NO_PLAN: Final = AssistPlan()
_NOTHING: Final = StepFeatures()


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """Copies to the device, as a step sees them. `awaited_bytes`: of adapters that the step uses, without
    those that CPU workers assist with; `backlog_bytes`: copied before them. `assisted_bytes`: of those that
    workers assist with, and `assist_delay_s`: by how much these delay the step."""

    awaited_bytes: int
    backlog_bytes: int
    assisted_bytes: int = 0
    assist_delay_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters that the step uses."""
        return self.awaited_bytes + self.assisted_bytes


class StartPolicy:
    """`costs`: predicted costs. `num_workers`: CPU workers that compute LoRA."""

    max_decode_stall = 0.05
    """The share of a step by which it may delay its decodes without any gain."""
    decode_weight = 0.1
    """The weight of a delay of one decode, against the same delay of a first token: a request has one first
    token and many others."""

    def __init__(self, cold_start: ColdStart, costs: DriftWatch | None = None, num_workers: int = 0) -> None:
        assert costs is not None or cold_start is not ColdStart.AUTO, "auto needs costs to decide by"
        self._cold_start = cold_start
        self._costs = costs
        self._num_workers = num_workers

    @property
    def keeps_all(self) -> bool:
        """Return whether all adapters are loaded at once and stay on the device."""
        return self._cold_start is ColdStart.CACHED

    @property
    def holds_steps(self) -> bool:
        """Return whether no step runs before the adapters of waiting requests are loaded."""
        return self._cold_start is ColdStart.ON_DEMAND

    @property
    def streams(self) -> bool:
        """Return whether requests may start before their adapter has arrived."""
        return self._cold_start in (ColdStart.PIPELINED, ColdStart.CPU_ASSIST, ColdStart.AUTO)

    @property
    def decides(self) -> bool:
        """Return whether costs decide which steps such requests join."""
        return self._costs is not None and self._cold_start in (ColdStart.CPU_ASSIST, ColdStart.AUTO)

    @property
    def assists(self) -> bool:
        """Return whether CPU workers may compute the first layers of an adapter that is being copied."""
        return self._num_workers > 0 and self._cold_start in (ColdStart.CPU_ASSIST, ColdStart.AUTO)

    def is_there_after(self, seconds: float, num_bytes: int) -> bool:
        """Return whether a request may join a step that begins after so many seconds, as its adapter has
        arrived by then if nothing else is copied."""
        if self._costs is None or not self.decides:
            return self.streams
        return self._costs.model.copy_s(num_bytes) <= seconds

    def may_join(
        self,
        *,
        before: StepFeatures,
        after: StepFeatures,
        in_flight_before: InFlight,
        in_flight_after: InFlight,
        steps_before: Sequence[StepFeatures] = (),
    ) -> bool:
        """Return whether a request may join a step, which is `after` with it and `before` without. The step
        begins when `steps_before` are over."""
        if self._costs is None or not self.decides:
            return self.streams
        if before.num_decodes + before.num_prompts == 0:
            return True  # it delays no other request
        model = self._costs.model
        step_s, begins_s = model.step_s(after), sum(map(model.step_s, steps_before))
        stall_s = _stall_s(model, in_flight_after, step_s, begins_s)
        added_s = stall_s - _stall_s(model, in_flight_before, model.step_s(before), begins_s)
        if before.num_decodes == 0 or stall_s <= self.max_decode_stall * step_s:
            return added_s * (before.num_decodes + before.num_prompts) <= step_s
        gained_bytes = self.gained_bytes(in_flight_before, in_flight_after)
        if gained_bytes == 0:
            return added_s <= 0
        # If it does not join, it waits until its adapter has arrived.
        gain_s = model.copy_s(gained_bytes) - begins_s - stall_s
        return added_s * (before.num_prompts + self.decode_weight * before.num_decodes) <= gain_s

    def gained_bytes(self, before: InFlight, after: InFlight) -> int:
        """Return the bytes that a request need not wait for if it joins, as far as that justifies a delay of
        decodes: only where there are CPU workers, whether or not they assist with this adapter."""
        return after.num_bytes - before.num_bytes if self.assists else 0

    def assist_plan(
        self,
        num_bytes: int,
        num_tokens: int,
        *,
        num_groups: int = 1,
        is_scored: bool = False,
        is_bus_free: bool = True,
        beside: StepFeatures = _NOTHING,
        steps_before: Sequence[StepFeatures] = (),
    ) -> AssistPlan:
        """Return how many of an adapter's first layers CPU workers compute for a prompt of `num_tokens` while
        the adapter is copied; with `auto`, none unless that is sure to save time. `num_groups`: groups of
        linears that it changes in a layer. `is_scored`: the tokens of the prompt are scored, so that its step
        is no captured graph. `is_bus_free`: nothing else is being copied; behind other copies, workers would
        take longer for all layers than the bus for all copies. `beside`: what else the step computes. It
        begins when `steps_before` are over; the copy begins at once."""
        if not self.assists or is_scored or not is_bus_free or not 2 <= num_tokens <= MAX_GRAPH_ROWS:
            return _NO_PLAN
        if self._costs is None:
            return AssistPlan(num_layers=1)
        model = self._costs.model
        num_layers = model.subject.num_layers
        layer_s = model.assist_layer_s(
            num_bytes, num_tokens=num_tokens, num_workers=self._num_workers, num_groups=num_groups
        )
        step_s = model.step_s(
            beside._replace(
                num_prompts=beside.num_prompts + 1, num_prompt_tokens=beside.num_prompt_tokens + num_tokens
            )
        )
        layer_bytes = [num_bytes // num_layers] * num_layers
        begins_s = sum(map(model.step_s, steps_before))
        plan = model.assist_layers(layer_bytes, step_s, layer_s, begins_s)
        is_unsure = self._cold_start is ColdStart.AUTO and not model.assist_is_sure(plan, step_s)
        return _NO_PLAN if is_unsure else plan

    def observe_copy(self, num_bytes: int, seconds: float) -> None:
        """Record the time of copies to the device that nothing delayed."""
        if self._costs is not None:
            predicted_s = self._costs.model.copy_s(num_bytes)
            self._costs.observe(CostKind.COPY, predicted_s=predicted_s, measured_s=seconds)

    def observe_step(self, step: StepFeatures, seconds: float) -> None:
        """Record the time of a step that waited for nothing."""
        if self._costs is not None:
            predicted_s = self._costs.model.step_s(step)
            self._costs.observe(CostKind.STEP, predicted_s=predicted_s, measured_s=seconds)


def _stall_s(model: CostModel, in_flight: InFlight, step_s: float, begins_s: float) -> float:
    """Return the delay of a step that begins after `begins_s`. Layers are taken to be alike."""
    if in_flight.awaited_bytes == 0:
        return in_flight.assist_delay_s
    first_bytes = in_flight.awaited_bytes / model.subject.num_layers
    first_s = model.copy_s(in_flight.backlog_bytes + first_bytes) - begins_s
    last_s = model.copy_s(in_flight.backlog_bytes + in_flight.awaited_bytes) - begins_s
    return max(model.even_stall_s(first_s, last_s, step_s), in_flight.assist_delay_s)
