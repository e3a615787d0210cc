"""Whether a request joins a step while its adapter is still being copied to the device.

It may: each layer of the step waits for its own weights. Whether it should depends on how long the others in
the step would wait with it, against the step that it would have to wait for otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from loraplex.core.cold_start import ColdStart
from loraplex.perf.cost_model import CostModel
from loraplex.perf.step_cost import StepFeatures

_MAX_DECODE_STALL: Final = 0.05
"""How much longer a step may take for those who decode in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coming:
    """Bytes on their way to the device: those that a step would wait for, and those in front of them."""

    awaited_bytes: int
    backlog_bytes: int


class StartPolicy:
    """`costs`: for `auto`, which asks them."""

    def __init__(self, cold_start: ColdStart, costs: CostModel | None = None) -> None:
        assert costs is not None or cold_start is not ColdStart.AUTO
        self.cold_start = cold_start
        self._costs = costs

    @property
    def streams(self) -> bool:
        """Whether requests may start before their adapter is there."""
        return self.cold_start in (ColdStart.PIPELINED, ColdStart.AUTO)

    def may_join(
        self,
        *,
        num_others: int,
        before: StepFeatures,
        after: StepFeatures,
        coming_before: Coming,
        coming_after: Coming,
    ) -> bool:
        """Whether a request may join a step of so many others, which is `after` with it and `before`
        without."""
        if self._costs is None:
            return self.streams
        if num_others == 0:
            return True  # nobody waits but itself
        step_s = self._costs.step_s(after)
        stall_s = self._stall_s(coming_after, step_s)
        if before.num_decodes > 0 and stall_s > _MAX_DECODE_STALL * step_s:
            return False
        added_s = stall_s - self._stall_s(coming_before, self._costs.step_s(before))
        return added_s * num_others <= step_s

    def _stall_s(self, coming: Coming, step_s: float) -> float:
        """Layers are taken to be alike."""
        assert self._costs is not None
        if coming.awaited_bytes == 0:
            return 0.0
        num_layers = self._costs.subject.num_layers
        arrivals = [
            self._costs.copy_s(coming.backlog_bytes + coming.awaited_bytes * (layer + 1) / num_layers)
            for layer in range(num_layers)
        ]
        return self._costs.stall_s(arrivals, step_s)
