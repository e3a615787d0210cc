"""The scheduler for a clock that is not of this world: what it decides, many steps at a time.

Every decision is the scheduler's own. What is added: those who do nothing but decode are taken together
for as long as nobody has to look at them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from loraplex.core.request import EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.decode_group import DecodeGroup, blocks_ahead
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import Chunk, StepPlan, TokenUpdate
from loraplex.scheduling.scheduler import Scheduler
from loraplex.scheduling.sequence import Sequence

ANY_TOKEN: Final = 1
"""Where tokens are made up: the one that is sampled."""


class LeapingScheduler(Scheduler):
    """Requests are expected to say how long they are: no token ends them."""

    def __init__(self, config: SchedulerConfig, memory: Memory, costs: DriftWatch | None = None) -> None:
        super().__init__(config, memory, costs)
        self._group: DecodeGroup | None = None

    @property
    def group(self) -> DecodeGroup | None:
        """All that run, if they do nothing but decode."""
        if self._group is None and not self._under_way and all(map(_decodes, self._running)):
            self._group = DecodeGroup(self._running, self._pool, self._config.max_model_len)
        return self._group

    def is_settling(self) -> bool:
        """Whether all that run after the steps under way will do nothing but decode, nobody waits, and
        whatever memory they will ever need is there."""
        if self._waiting or self._residency.num_loading > 0 or not self._all_is_quiet(under_way=True):
            return False
        if any(sequence.num_remaining != 1 for sequence in self._running):
            return False
        limit = self._config.max_model_len
        return sum(blocks_ahead(s, self._pool, limit) for s in self._running) <= self._pool.num_empty

    def go_beside(self, requests: Iterable[EngineRequest]) -> bool:
        """Whether requests that are not known yet could join the group with their whole prompts in one step
        and go on with it, if those who end meanwhile gave nothing back."""
        group, joining = self.group, [Sequence(request) for request in requests]
        return group is not None and self._all_is_quiet() and self._may_start(joining, group)

    def leap_length(self) -> int:
        """For how many steps from now the group goes on as it is; the last of these may end some. 0: the next
        step has to be decided."""
        group = self.group if self._can_leap() else None
        return 0 if group is None else group.steps_left

    def leap(self, num_steps: int) -> list[TokenUpdate]:
        """As so many times `schedule` and `update`, with a token each time that ends nobody. Returns how
        requests ended, which is with the last of these steps."""
        assert self._group is not None
        ended = self._group.advance(num_steps, ANY_TOKEN)
        for sequence in ended:
            self._publish(sequence, sequence.num_computed)
        return [self._accept(sequence, ANY_TOKEN) for sequence in ended]

    def schedule_beside(self) -> StepPlan | None:
        """The next step, if the group goes on in it beside the whole prompts of all who wait: the plan names
        these alone. None if it is not so easily decided."""
        if not self._waiting or not self._all_is_quiet():
            return None
        group, chunks = self.group, list[Chunk]()
        if group is None or not self._may_start(self._waiting, group):
            return None
        self.adapters.bring_in(self._waiting, self._running)
        self._admit(chunks, 1 + sum(self._config.work.cost(0, len(s.token_ids)) for s in self._waiting))
        assert not self._waiting
        return self._plan(chunks)

    def update_beside(self, plan: StepPlan) -> list[TokenUpdate]:
        """Account for a step that `schedule_beside` decided; of the group, how requests ended."""
        assert self._group is not None
        ended = self.leap(1) if len(self._group) > 0 else []
        updates = self.update(plan, {chunk.request_id: ANY_TOKEN for chunk in plan.chunks})
        for update in updates:
            if update.finish_reason is None:
                self._group.enter(self._sequences[update.request_id])
        return ended + updates

    def _can_leap(self) -> bool:
        if not self._waiting:
            return self._all_is_quiet()
        # Those for whom a step of decodes had no place have none before one of these ends.
        shares = self._memory.shared or self._config.work.position_cost > 0
        return self._is_settled and not shares and self._residency.num_loading == 0 and self._all_is_quiet()

    def _all_is_quiet(self, *, under_way: bool = False) -> bool:
        """Whether nothing is done that no request asked for. `under_way`: steps may be."""
        busy = (self._under_way and not under_way) or self._failures or self._config.loads_popular
        return not busy and not self.adapters.has_work()

    def _may_start(self, waiting: Collection[Sequence], group: DecodeGroup) -> bool:
        """Whether all of these find what they need to run beside the group, in its next step or the one
        after it, and to the end."""
        config, work = self._config, self._config.work
        if config.prompts_first or config.max_adapters is not None:
            return False
        lengths = [len(sequence.token_ids) for sequence in waiting]
        num_decodes = len(group) + len(lengths)
        positions = group.positions + len(group) + sum(lengths)
        budget = work.prefill_budget(num_decodes + work.position_cost * positions)
        return (
            self._residency.num_loading == 0
            and len(lengths) <= min(config.max_running - len(self._running), config.prefetch_depth)
            and sum(work.cost(0, length) for length in lengths) <= budget
            and all(s.adapter is None or self._residency.is_resident(s.adapter) for s in waiting)
            and group.has_room_for(waiting)
        )

    def _dissolve_group(self) -> None:
        """Before anybody looks at those that are in it."""
        if self._group is None:
            return
        self._group.settle(ANY_TOKEN)
        for sequence in self._running:
            self._publish(sequence, sequence.num_computed)
        self._group = None

    # ---- who looks at them one by one

    def schedule(self) -> StepPlan:
        self._dissolve_group()
        return super().schedule()

    def cancel(self, request_id: str) -> None:
        self._dissolve_group()
        super().cancel(request_id)

    def _fail_all(self, version: str, message: str, *, pinned: bool) -> None:
        self._dissolve_group()
        super()._fail_all(version, message, pinned=pinned)

    def stats(self, num_steps: int) -> EngineStats:
        self._dissolve_group()
        return super().stats(num_steps)

    def check_integrity(self) -> None:
        self._dissolve_group()
        super().check_integrity()


def _decodes(sequence: Sequence) -> bool:
    """Of a prompt's last token comes a first one, at a time of its own: that is not decoding yet."""
    return sequence.num_remaining == 1 and sequence.num_unknown == 0 and sequence.num_output > 0
