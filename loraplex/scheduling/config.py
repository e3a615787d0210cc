"""Configuration of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.core.batching import Batching, DelayBound
from loraplex.core.cold_start import ColdStart
from loraplex.scheduling.batching.credits import CreditLimits
from loraplex.scheduling.batching.thresholds import Tuning
from loraplex.scheduling.work import StepWork


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step.

    `prefetch_depth`: number of waiting requests whose adapters may start to load. `cold_start`: what requests
    do until their adapter is loaded. `num_workers`: processes that compute LoRA on CPUs. `loads_popular`:
    load adapters that are requested often before they are requested again. `batching`: which requests run
    together; `max_delay`: by how much that may delay a request; `tuning`: how the thresholds of
    `Batching.DYNAMIC` adapt; `credits`: when its adapters starve. `max_borrowing`: share by which a tenant
    may make the steps of others longer by running more than its share (`borrowing`); None for no bound.

    Two rules of other engines, which the twin simulates: `prompts_first`: a step computes whole prompts if
    there are any, otherwise it decodes. `max_adapters`: number of different adapters that may run at a time;
    requests on others are skipped until then, those behind them are not.
    """

    max_model_len: int
    work: StepWork = field(default_factory=StepWork)
    max_running: int = 256
    prefetch_depth: int = 64
    cold_start: ColdStart = ColdStart.OVERLAP
    num_workers: int = 0
    loads_popular: bool = False
    batching: Batching = Batching.FCFS
    max_delay: DelayBound = field(default_factory=DelayBound)
    tuning: Tuning = Tuning.PAPER
    credits: CreditLimits = field(default_factory=CreditLimits)
    max_borrowing: float | None = None
    prompts_first: bool = False
    max_adapters: int | None = None
