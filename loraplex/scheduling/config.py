"""What a scheduler is told once."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.core.cold_start import ColdStart
from loraplex.scheduling.work import StepWork


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step. `prefetch_depth`: how far down the queue adapters start to load. `cold_start`: what
    requests do until then; `num_workers`: processes that compute LoRA on CPUs. `loads_popular`:
    adapters that are asked for often are brought in before they are asked for again.

    Two rules of engines that are not ours, which the twin runs under: `prompts_first`: a step reads whole
    prompts, as soon as there are any, or else decodes. `max_adapters`: so many different ones may run at a
    time; requests on others are passed over until then, and those behind them are not."""

    max_model_len: int
    work: StepWork = field(default_factory=StepWork)
    max_running: int = 256
    prefetch_depth: int = 64
    cold_start: ColdStart = ColdStart.OVERLAP
    num_workers: int = 0
    loads_popular: bool = False
    prompts_first: bool = False
    max_adapters: int | None = None
