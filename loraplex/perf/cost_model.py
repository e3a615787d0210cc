"""What things cost on one machine with one model: the questions that policies ask, answered in seconds.

Pure: the answers depend on the figures alone. What is measured while serving comes in through `perf.drift`,
which makes a corrected model of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from loraplex.perf import layer_pipeline
from loraplex.perf.assist_cost import AssistCost
from loraplex.perf.layer_pipeline import Bus
from loraplex.perf.line import Line
from loraplex.perf.read_cost import ReadCost
from loraplex.perf.step_cost import StepCost, StepFeatures
from loraplex.perf.subject import Subject


class CostKind(StrEnum):
    """Costs that are watched and corrected, each by itself."""

    COPY = "copy"
    READ = "read"
    DISK = "disk"
    STEP = "step"
    ASSIST = "assist"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """What each cost is multiplied with: how much slower the machine was found to be than it was said."""

    copy: float = 1.0
    read: float = 1.0
    disk: float = 1.0
    step: float = 1.0
    assist: float = 1.0

    def of(self, kind: CostKind) -> float:
        factor: float = getattr(self, kind.value)
        return factor


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """`measured`: by `loraplex profile`; otherwise cautious guesses (`perf.default_model`).

    `bus`: from pinned host memory to the device; None where adapters are computed with from host memory.
    `read`: a file in the page cache. `disk`: a file that is not.
    """

    subject: Subject
    measured: bool
    bus: Bus | None
    read: ReadCost
    disk: Line
    step: StepCost
    assist: AssistCost
    corrections: Corrections = field(default_factory=Corrections)

    def copy_s(self, num_bytes: float) -> float:
        """Of one copy to the device."""
        return 0.0 if self.bus is None else self.bus.copy.seconds(num_bytes) * self.corrections.copy

    def read_s(self, num_bytes: float, num_readers: int = 1) -> float:
        """Of a file that the page cache holds, by this many threads at a time."""
        return self.read.seconds(num_bytes, num_readers) * self.corrections.read

    def disk_s(self, num_bytes: float) -> float:
        """Of a file that the page cache does not hold."""
        return self.disk.seconds(num_bytes) * self.corrections.disk

    def step_s(self, step: StepFeatures) -> float:
        return self.step.seconds(step) * self.corrections.step

    def layer_s(self, step: StepFeatures) -> float:
        """Of one layer; what comes before and after the layers is shared out among them."""
        return self.step_s(step) / self.subject.num_layers

    def assist_layer_s(
        self, *, num_tokens: int, weights_of_groups: Sequence[int], num_cores: int, activation_bytes: int = 0
    ) -> float:
        """Of CPU workers for one layer's LoRA, with what they take from the device and bring back to it.

        `weights_of_groups`: A's and B's elements of each group of linears that share an input.
        """
        computed_s = self.assist.layer_s(
            num_tokens=num_tokens, weights_of_groups=weights_of_groups, num_cores=num_cores
        )
        return computed_s * self.corrections.assist + self.copy_s(activation_bytes)

    def arrivals_s(
        self, layer_bytes: Sequence[int], groups: Sequence[int], num_readers: int | None = None
    ) -> list[float]:
        """When each layer is on the device, counted from now.

        `num_readers`: the adapter is read from the page cache meanwhile, by this many threads; None if it is
        in host memory.
        """
        return layer_pipeline.arrivals_s(self._feed(num_readers), layer_bytes, groups)

    def stall_s(self, arrivals: Sequence[float], step_s: float) -> float:
        """For how long a step that is launched now waits for layers that are not there yet."""
        return layer_pipeline.stall_s(arrivals, step_s)

    def even_stall_s(self, first_s: float, last_s: float, step_s: float) -> float:
        """`stall_s` where layers arrive at an even pace, or ever more slowly, or in several such streams: the
        first and the last of them tell."""
        return max(0.0, first_s, last_s - step_s * (1 - 1 / self.subject.num_layers))

    def plan_groups(
        self, layer_bytes: Sequence[int], step_s: float, num_readers: int | None = None
    ) -> tuple[int, ...]:
        """How many layers to copy at a time, so that a step launched now stalls least."""
        return layer_pipeline.plan_groups(self._feed(num_readers), layer_bytes, step_s)

    def assist_layers(
        self,
        layer_bytes: Sequence[int],
        step_s: float,
        assist_layer_s: float,
        num_readers: int | None = None,
    ) -> layer_pipeline.AssistPlan:
        """How many of the first layers CPU workers should compute; none if the bus alone is as fast."""
        return layer_pipeline.assist_layers(self._feed(num_readers), layer_bytes, step_s, assist_layer_s)

    def _feed(self, num_readers: int | None) -> Bus:
        """The bus as a load sees it: corrected, and no faster than what it is fed from."""
        copy, launch_s = Line(latency_s=0.0, unit_s=0.0), 0.0
        if self.bus is not None:
            factor = self.corrections.copy
            launch_s = self.bus.launch_s * factor
            copy = Line(latency_s=self.bus.copy.latency_s * factor, unit_s=self.bus.copy.unit_s * factor)
        if num_readers is None:
            return Bus(copy=copy, launch_s=launch_s)
        read, factor = self.read.line(num_readers), self.corrections.read
        # Reading the next group overlaps with copying this one, so the slower of both sets the pace.
        fed = Line(
            latency_s=copy.latency_s + read.latency_s * factor,
            unit_s=max(copy.unit_s, read.unit_s * factor),
        )
        return Bus(copy=fed, launch_s=max(launch_s, read.latency_s * factor))
