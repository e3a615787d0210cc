"""What a scheduler is told once."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.core.cold_start import ColdStart
from loraplex.scheduling.work import StepWork


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step. `prefetch_depth`: how far down the queue adapters start to load. `cold_start`: what
    requests do until then; `num_workers`: processes that compute LoRA on CPUs. `loads_popular`:
    adapters that are asked for often are brought in before they are asked for again."""

    max_model_len: int
    work: StepWork = field(default_factory=StepWork)
    max_running: int = 256
    prefetch_depth: int = 64
    cold_start: ColdStart = ColdStart.OVERLAP
    num_workers: int = 0
    loads_popular: bool = False
