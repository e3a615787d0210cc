"""Whether a request joins a step while its adapter is still being copied to the device.

It may: each layer of the step waits for its own weights. Whether it should depends on how long the others in
the step would wait with it, against the step that it would have to wait for otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.core.cold_start import ColdStart
from loraplex.perf.cost_model import CostKind, CostModel
from loraplex.perf.drift import DriftWatch
from loraplex.perf.step_cost import StepFeatures

_ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_DECODE_STALL: Final = 0.05
"""How much longer a step may take for those who decode in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coming:
    """Bytes on their way to the device: those that a step would wait for, and those in front of them."""

    awaited_bytes: int
    backlog_bytes: int


class StartPolicy:
    """`costs`: what things take. `num_workers`: processes that compute LoRA on CPUs."""

    def __init__(self, cold_start: ColdStart, costs: DriftWatch | None = None, num_workers: int = 0) -> None:
        assert costs is not None or cold_start is not ColdStart.AUTO, "auto has to know what things take"
        self._cold_start = cold_start
        self._costs = costs
        self._num_workers = num_workers

    @property
    def streams(self) -> bool:
        """Whether requests may start before their adapter is there."""
        return self._cold_start in (ColdStart.PIPELINED, ColdStart.CPU_ASSIST, ColdStart.AUTO)

    @property
    def weighs(self) -> bool:
        """Whether that depends on what steps take."""
        return self._cold_start is ColdStart.AUTO

    def is_there_after(self, seconds: float, num_bytes: int) -> bool:
        """Whether a request may join a step that begins so long from now, as its adapter will be there then,
        with nothing else on its way."""
        if self._costs is None or not self.weighs:
            return self.streams
        return self._costs.model.copy_s(num_bytes) <= seconds

    def may_join(
        self,
        *,
        before: StepFeatures,
        after: StepFeatures,
        coming_before: Coming,
        coming_after: Coming,
        under_way: Sequence[StepFeatures] = (),
    ) -> bool:
        """Whether a request may join a step, which is `after` with it and `before` without, and begins when
        those are over that are under way."""
        if self._costs is None or not self.weighs:
            return self.streams
        num_others = before.num_decodes + before.num_prompts
        if num_others == 0:
            return True  # nobody waits but itself
        model = self._costs.model
        step_s, begins_s = model.step_s(after), sum(map(model.step_s, under_way))
        stall_s = _stall_s(model, coming_after, step_s, begins_s)
        if before.num_decodes > 0 and stall_s > _MAX_DECODE_STALL * step_s:
            return False
        added_s = stall_s - _stall_s(model, coming_before, model.step_s(before), begins_s)
        return added_s * num_others <= step_s

    def assisted_layers(self, num_bytes: int, prompt: StepFeatures) -> int:
        """How many of an adapter's first layers CPU workers compute for a prompt, while it loads. Where that
        is asked for, one at least."""
        if self._cold_start is not ColdStart.CPU_ASSIST or self._num_workers == 0:
            return 0
        if self._costs is None:
            return 1
        model = self._costs.model
        layer_bytes = num_bytes // model.subject.num_layers
        layer_s = model.assist_layer_s(
            num_tokens=prompt.num_rows,
            weights_of_groups=[layer_bytes // _ELEMENT_BYTES[model.subject.dtype]],
            num_cores=self._num_workers,
        )
        plan = model.assist_layers([layer_bytes] * model.subject.num_layers, model.step_s(prompt), layer_s)
        return max(plan.num_layers, 1)

    def observe_copy(self, num_bytes: int, seconds: float) -> None:
        """What copies to the device took that nothing was in the way of."""
        if self._costs is not None:
            predicted_s = self._costs.model.copy_s(num_bytes)
            self._costs.observe(CostKind.COPY, predicted_s=predicted_s, measured_s=seconds)

    def observe_step(self, step: StepFeatures, seconds: float) -> None:
        """What a step took that waited for nothing."""
        if self._costs is not None:
            predicted_s = self._costs.model.step_s(step)
            self._costs.observe(CostKind.STEP, predicted_s=predicted_s, measured_s=seconds)


def _stall_s(model: CostModel, coming: Coming, step_s: float, begins_s: float) -> float:
    """Of a step that begins so long from now. Layers are taken to be alike."""
    if coming.awaited_bytes == 0:
        return 0.0
    first_bytes = coming.awaited_bytes / model.subject.num_layers
    first_s = model.copy_s(coming.backlog_bytes + first_bytes) - begins_s
    last_s = model.copy_s(coming.backlog_bytes + coming.awaited_bytes) - begins_s
    return model.even_stall_s(first_s, last_s, step_s)
