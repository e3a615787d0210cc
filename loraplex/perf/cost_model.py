"""The cost model: predicted seconds of steps, copies and reads on one machine with one model.

Pure: predictions depend on the figures alone. `perf.drift` takes measurements while serving and replaces the
model by a corrected one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from loraplex.perf import layer_pipeline
from loraplex.perf.assist_cost import AssistCost
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.held_out import HeldOut
from loraplex.perf.layer_pipeline import Bus
from loraplex.perf.line import Line
from loraplex.perf.step_cost import StepCost, StepFeatures
from loraplex.perf.subject import Subject


class CostKind(StrEnum):
    """Costs that are watched and corrected independently: those that policies decide by."""

    COPY = "copy"
    STEP = "step"


class KernelKind(StrEnum):
    """The scaling of LoRA kernels: with each adapter's own rank (MBGMV, and ours), or with the largest rank
    in the batch (BGMV)."""

    RANK = "rank-proportional"
    PADDED = "padded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """Factors that costs are multiplied by: how much slower than predicted the machine was found to be."""

    copy: float = 1.0
    step: float = 1.0

    def of(self, kind: CostKind) -> float:
        factor: float = getattr(self, kind.value)
        return factor


CAUTIOUS_MERGE: Final = Line(latency_s=10e-3, unit_s=1 / 50e6)
"""Merging on a slow CPU, which unpacks the weights and packs the merged ones: two busy cores of a virtual
machine took 2.6 s for the 425 MB of a 135M model, or for the 212 MB of its bfloat16 weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Predicted costs of an engine. `measured`: by `loraplex profile`; otherwise cautious guesses
    (`perf.default_model`).

    `bus`: copies from pinned host memory to the device; None if adapters are computed from host memory.
    `read`: reading an adapter whose file is in the page cache into host memory, by the engine's own reader.
    `disk`: reading a file that is not in the page cache. `held_out`, `memory`: None if not measured.
    `kernels`: how the bytes of a step's adapters are counted. `merge`: merging an adapter, by the bytes of
    its merged weights.
    """

    subject: Subject
    measured: bool
    bus: Bus | None
    read: Line
    disk: Line
    step: StepCost
    assist: AssistCost
    held_out: HeldOut | None = None
    memory: EngineMemory | None = None
    corrections: Corrections = field(default_factory=Corrections)
    kernels: KernelKind = KernelKind.RANK
    merge: Line = CAUTIOUS_MERGE

    def copy_s(self, num_bytes: float) -> float:
        """Return the seconds of one copy to the device."""
        return 0.0 if self.bus is None else self.bus.copy.seconds(num_bytes) * self.corrections.copy

    def read_s(self, num_bytes: float) -> float:
        """Return the seconds to read an adapter whose file the page cache holds."""
        return self.read.seconds(num_bytes)

    def reload_s(self, num_bytes: int, *, from_host: bool) -> float:
        """Return the seconds to load an evicted adapter again, from host memory or else from disk: memory
        that is short of adapters is taken to hold none of their files."""
        return self.copy_s(num_bytes) + (0.0 if from_host else self.disk.seconds(num_bytes))

    def step_s(self, step: StepFeatures) -> float:
        if self.kernels is KernelKind.PADDED:
            step = step.padded()
        return self.step.seconds(step) * self.corrections.step

    def merge_s(self, num_bytes: float) -> float:
        """Return the seconds to write merged weights of so many bytes; the step after it waits for them."""
        return self.merge.seconds(num_bytes) * self.corrections.step

    def arrivals_s(self, layer_bytes: Sequence[int], groups: Sequence[int]) -> list[float]:
        """Return when each layer arrives on the device, in seconds from now; the adapter is in host
        memory."""
        return layer_pipeline.arrivals_s(self._bus(), layer_bytes, groups)

    def stall_s(self, arrivals: Sequence[float], step_s: float) -> float:
        """Return how many seconds a step launched now waits for layers that are not there yet."""
        return layer_pipeline.stall_s(arrivals, step_s)

    def even_stall_s(self, first_s: float, last_s: float, step_s: float) -> float:
        """Return `stall_s` for layers that arrive at an even pace, or ever more slowly, or in several such
        streams: then the first and last arrivals suffice."""
        return max(0.0, first_s, last_s - step_s * (1 - 1 / self.subject.num_layers))

    def plan_groups(self, layer_bytes: Sequence[int], step_s: float) -> tuple[int, ...]:
        """Return how many layers to copy at a time, so that a step launched now stalls least, and a slower
        step stalls little more."""
        best = layer_pipeline.plan_groups(self._bus(), layer_bytes, step_s)
        return tuple(layer_pipeline.cut_groups(best, layer_bytes))

    def assist_layer_s(
        self, num_bytes: int, *, num_tokens: int, num_workers: int, num_groups: int = 1
    ) -> float:
        """Return the seconds that CPU workers add to each layer that they compute of an adapter, for a prompt
        of `num_tokens`. `num_groups`: groups of linears that the adapter changes in a layer."""
        return self.assist.layer_s(
            num_bytes // (self.subject.num_layers * self.subject.element_bytes),
            num_groups=num_groups,
            num_tokens=num_tokens,
            num_workers=num_workers,
        )

    def assist_layers(
        self, layer_bytes: Sequence[int], step_s: float, assist_layer_s: float, begins_s: float = 0.0
    ) -> layer_pipeline.AssistPlan:
        """Return how many of the first layers CPU workers should compute in a step that begins after so many
        seconds; none if the bus alone is as fast."""
        return layer_pipeline.assist_layers(self._bus(), layer_bytes, step_s, assist_layer_s, begins_s)

    def assist_is_sure(self, plan: layer_pipeline.AssistPlan, step_s: float) -> bool:
        """Return whether CPU workers save more of a step of `step_s` than their predicted cost may be off."""
        return plan.saved_s > self.assist.error * (step_s + plan.delay_s)

    def _bus(self) -> Bus:
        """Return the corrected bus; if there is none, one that takes no time."""
        if self.bus is None:
            return Bus(copy=Line(latency_s=0.0, unit_s=0.0), launch_s=0.0)
        copy, factor = self.bus.copy, self.corrections.copy
        return Bus(
            copy=Line(latency_s=copy.latency_s * factor, unit_s=copy.unit_s * factor),
            launch_s=self.bus.launch_s * factor,
        )


def with_copies_at_most(model: CostModel, bytes_per_s: float) -> CostModel:
    """Return the model of the same engine on a bus that is no faster than this rate."""
    if model.bus is None:
        return model
    copy = replace(model.bus.copy, unit_s=max(model.bus.copy.unit_s, 1 / bytes_per_s))
    return replace(model, bus=replace(model.bus, copy=copy))


def with_padded_kernels(model: CostModel) -> CostModel:
    """Return the model of the same engine with kernels that pad: a batch of equal ranks takes as long as
    before, and in a mixed batch every adapter costs as much as the largest."""
    return replace(model, kernels=KernelKind.PADDED)
