"""Has an engine run steps on merged weights, where its scheduler would not: a test chooses the version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.batching import Batching
from loraplex.engine.core import Engine
from loraplex.scheduling.batching.batcher import Batcher
from loraplex.scheduling.plan import StepPlan


@dataclass
class Merging:
    """Changes the plans of an engine. `wanted`: the version to be merged from the next step on, or None.
    Steps of that version alone run on its merged weights, all others on the base model's."""

    engine: Engine
    specs: list[AdapterSpec]
    wanted: str | None = None
    merged: str | None = None
    num_merged_steps: int = 0
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler = self.engine._scheduler
        config = replace(scheduler._config, batching=Batching.FCFS)
        # In place: the scheduler's parts share it.
        vars(scheduler.batcher).update(vars(Batcher(config, self.engine._memory, None)))
        schedule = scheduler.schedule
        scheduler.schedule = lambda: self._change(schedule)  # type: ignore[method-assign]

    def _change(self, schedule: Callable[[], StepPlan]) -> StepPlan:
        memory, merge, drops = self.engine._memory, None, False
        if self.wanted is None and self.merged is not None:
            memory.give_back_merged()
            self.merged, drops = None, True
        elif self.wanted is not None and self.wanted in memory.table.serving.resident:
            spec = next(each for each in self.specs if each.version == self.wanted)
            num_bytes = self.engine._executor.merge_bytes(spec)
            assert num_bytes is not None
            assert memory.table.acquire(self.wanted)  # it must not be evicted for its own merged weights
            if self.merged != self.wanted and memory.take_merged(num_bytes):
                scheduler = self.engine._scheduler
                scheduler.adapters.pins.follow_moves(scheduler._running)
                merge = self.merged = self.wanted
            memory.table.unpin(self.wanted)
        plan = schedule()
        runs_merged = bool(plan.chunks) and self.merged is not None
        runs_merged = runs_merged and {chunk.adapter for chunk in plan.chunks} == {self.merged}
        self.num_merged_steps += runs_merged
        plan = plan._replace(merge=merge, merged=self.merged if runs_merged else None, drops_merged=drops)
        self.plans.append(plan)
        return plan
