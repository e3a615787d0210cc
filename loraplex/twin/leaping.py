"""The scheduler on a virtual clock, which can decide many steps at a time.

Every decision is the scheduler's own. What is added: requests that only decode are advanced together, as long
as nothing needs their individual state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.request import EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import AdapterRead, Chunk, StepPlan, TokenUpdate
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.scheduler import Scheduler
from loraplex.twin.decode_group import DecodeGroup, blocks_ahead, blocks_of

ANY_TOKEN: Final = 1
"""The token that is sampled in simulations."""


class LeapingScheduler(Scheduler):
    """A scheduler for requests of known length: no stop token ends them."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: Memory,
        costs: DriftWatch | None = None,
        adapter_weight: Callable[[str], int] = lambda version: 0,
        clock: Clock | None = None,
    ) -> None:
        """`adapter_weight`: returns an adapter's weight, as the step times count it."""
        super().__init__(config, memory, costs, clock=clock)
        self._adapter_weight = adapter_weight
        self._group: DecodeGroup | None = None
        self._joining: list[tuple[RequestState, Chunk]] = []

    @property
    def group(self) -> DecodeGroup | None:
        """All running requests, if they only decode."""
        if self._group is None and not self._under_way and all(map(_decodes, self._running)):
            self._group = DecodeGroup(
                self._running, self._pool, self._config.max_model_len, self._adapter_weight
            )
        return self._group

    def is_settling(self) -> bool:
        """Return whether, after the steps in flight, all running requests only decode, all waiting ones wait
        for reads, and all memory that the running ones will need is free."""
        if self._table.serving.num_loading > 0 or not self._all_is_quiet(under_way=True):
            return False
        if not self._pins.only_reads(self._waiting):
            return False
        if any(sequence.num_remaining != 1 for sequence in self._running):
            return False
        limit = self._config.max_model_len
        return sum(blocks_ahead(s, self._pool, limit) for s in self._running) <= self._pool.num_empty

    # ---- the group alone

    def leap_length(self) -> int:
        """Return the number of steps for which the group stays as it is; the last of them may end some
        requests. 0: the next step has to be decided."""
        group = self.group if self._can_leap() else None
        return 0 if group is None else group.steps_left

    def leap(self, num_steps: int) -> list[TokenUpdate]:
        """Do what `num_steps` calls of `schedule` and `update` do, with tokens that are no stop tokens.
        Return the updates of requests that end, which is with the last step."""
        assert self._group is not None
        if self._config.batching.groups:
            self._admission.bring_in()  # as each of these steps does: the queue is not long any more
        ended = self._group.advance(num_steps, ANY_TOKEN)
        if not ended:
            return []
        for sequence in ended:
            self._queues.publish(sequence, sequence.num_computed)
        return [self._accept(sequence, ANY_TOKEN) for sequence in ended]

    def _can_leap(self) -> bool:
        if not self._waiting:
            return self._all_is_quiet()
        if self._table.serving.num_loading > 0 or not self._all_is_quiet():
            return False
        # Waiting requests that did not fit a step of decodes do not fit before one of these ends.
        shares = self._memory.shared or self._config.work.position_cost > 0
        return (self._queues.is_settled and not shares) or self._pins.only_reads(self._waiting)

    def _all_is_quiet(self, *, under_way: bool = False) -> bool:
        """Return whether nothing is pending except the work of requests. `under_way`: allow steps in
        flight."""
        if (self._under_way and not under_way) or self._queues.failures or self._config.loads_popular:
            return False
        if self.batcher.pauses:
            return False  # the requests of the next step have to be chosen
        if self.fair.is_shared:
            return False  # whose turn it is depends on what each tenant has got by then
        if self._config.batching.groups and self._waiting:
            return False  # whose turn it is depends on the time of each step
        if self._pool.num_locked > 0:  # copies of KV blocks are under way, which free memory when they end
            return False
        return not self.adapters.has_work()

    # ---- requests that join the group

    def go_beside(self, requests: Sequence[EngineRequest]) -> bool:
        """Return whether these new requests could join the group with their whole prompts in one step and
        stay in it, even if requests that end meanwhile freed nothing."""
        group, limit = self.group, self._config.max_model_len
        if group is None or self._waiting or not self._all_is_quiet() or self._will_be_shared(requests):
            return False
        num_tokens = sum([request.num_tokens for request in requests])
        if not self._may_start(len(requests), num_tokens, [request.adapter for request in requests]):
            return False
        return group.has_room_for(sum([blocks_of(request, self._pool, limit) for request in requests]))

    def start_beside(self, *, sure: bool = False) -> list[Chunk] | None:
        """Let all waiting requests join the next step of the group with their whole prompts, and return their
        chunks; None if the step has to be decided by `schedule`. `sure`: `go_beside` or `may_load_beside` has
        allowed it; requests that wait for a read keep waiting."""
        group, waiting = self.group, self._waiting
        if group is None or not waiting or not (sure or self._may_join_all(group)):
            return None
        chunks: list[Chunk] = []
        first = len(self._running)
        self._admission.bring_in()
        # The budget was found to be enough for all of them.
        self._admission.admit(
            chunks, 1 + self._config.work.cost(0, sum([len(s.token_ids) for s in waiting])), []
        )
        assert not waiting.has_candidates, "a request that does not wait for a read was found to have a place"
        self._joining = list(zip(self._running[first:], chunks, strict=True))
        return chunks

    def end_beside(self) -> list[TokenUpdate]:
        """Account for the step; return the updates of those that joined, and of group members that ended."""
        group, joining = self._group, self._joining
        assert group is not None
        updates = self.leap(1) if len(group) > 0 else []
        for sequence, chunk in joining:
            sequence.num_computed = chunk.end
            self._queues.publish(sequence, chunk.end)
            update = self._accept(sequence, ANY_TOKEN)
            updates.append(update)
            if update.finish_reason is None:
                group.enter(sequence)
        return updates

    def wait_beside(
        self, requests: Sequence[EngineRequest], *, sure: bool = False
    ) -> tuple[AdapterRead, ...] | None:
        """Queue requests that can only wait until their adapters are read into host memory, while the group
        goes on. Return the reads to begin; None if this is not so for all of them, and nothing is queued.
        `sure`: the group is known to go on, with one request that joins it in the next step."""
        if not (sure or self._can_leap()) or self._will_be_shared(requests):
            return None
        if self._config.batching.groups:
            return None  # requests that wait would end the leap
        if not self._await_reads(requests):
            return None
        for request in requests:
            self.add(request)
        self._admission.bring_in()
        return self._pins.reads.take()

    def may_load_beside(self, version: str, step_s: float, due: Sequence[EngineRequest]) -> bool:
        """Return whether the one request that waits for a version, which has just been read, could join the
        step after the group's next one: its adapter is loaded by then, as the next step takes at least
        `step_s`, and there is room for all without evicting or moving anything. A waiting request whose
        adapter is resident joins the next step. All others wait for reads, also the `due` ones, which are not
        queued yet."""
        group, waiting = self.group, self._waiting.on_version(version)
        if group is None or len(waiting) != 1 or group.steps_left < 2:
            return False
        joining = list(self._waiting.candidates())
        if (
            self._any_awaits_host()
            or len(joining) > 1
            or not (self._all_is_quiet() if joining else self._can_leap())
        ):
            return False
        if self._will_be_shared(due):
            return False
        if due and (not self._await_reads(due) or any(each.adapter == version for each in due)):
            return False
        num_tokens = len(waiting[0].token_ids)
        if not self._may_start(len(self._waiting) + len(due), num_tokens, (), joining):
            return False
        num_bytes, limit = self._table.num_bytes(version), self._config.max_model_len
        room = self._memory.max_tokens(0) - self._memory.max_tokens(num_bytes)
        num_blocks = sum([blocks_ahead(each, self._pool, limit) for each in (*waiting, *joining)])
        num_blocks += self._pool.blocks_for(room) + len(self._running) + len(joining)
        return group.has_room_for(num_blocks) and self._pins.starts.is_there_after(step_s, num_bytes)

    def load_beside(self, version: str, due: Sequence[EngineRequest]) -> tuple[AdapterRead, ...]:
        """Record that a version was read and loaded, and queue the `due` requests. Return the reads to
        begin."""
        self.adapter_read(version)
        for request in due:
            self.add(request)
        self._admission.bring_in()
        loads = self._pins.take_loads()
        assert [load.version for load in loads] == [version], "there was room for it"
        self.adapter_loaded(version)
        return self._pins.reads.take()

    def _await_reads(self, requests: Sequence[EngineRequest]) -> bool:
        """Return whether these new requests can do nothing before their adapters are read."""
        if self._pins.starts.holds_steps:
            return False
        return all(self._awaits_read(request.adapter) for request in requests)

    def _awaits_read(self, version: str | None) -> bool:
        if version is None or not self._table.is_absent(version):
            return False
        return not self._table.can_load(version)

    def _may_join_all(self, group: DecodeGroup) -> bool:
        waiting, limit = self._waiting, self._config.max_model_len
        if self._are_too_many(len(waiting)):  # do not iterate over a long queue
            return False
        num_tokens = sum([len(sequence.token_ids) for sequence in waiting])
        return (
            self._all_is_quiet()
            and not self._any_awaits_host()
            and self._may_start(len(waiting), num_tokens, [sequence.adapter for sequence in waiting])
            and group.has_room_for(sum([blocks_ahead(s, self._pool, limit) for s in waiting]))
        )

    def _any_awaits_host(self) -> bool:
        """Return whether any waiting request's keys and values are to be copied from the host first."""
        swapping = self._swapping
        return swapping is not None and any(map(swapping.awaits_host, self._waiting))

    def _may_start(
        self,
        num_waiting: int,
        num_tokens: int,
        versions: Iterable[str | None],
        joining: Sequence[RequestState] = (),
    ) -> bool:
        """Return whether all of these have what they need, apart from KV memory. `joining`: requests that
        will run by then."""
        config, table, num_running = self._config, self._table, len(self._running) + len(joining)
        if config.prompts_first or config.max_adapters is not None:
            return False
        if table.serving.num_loading > 0 or self._are_too_many(num_waiting):
            return False
        work, positions = config.work, 0 if self._group is None else self._group.positions + num_running
        positions += sum([len(each.token_ids) for each in joining])
        # Separate prompts cost no more than one prompt of the same length.
        if work.cost(0, num_tokens) > work.prefill_budget(num_running + work.position_cost * positions):
            return False
        return all(version is None or version in table.serving.resident for version in versions)

    def _are_too_many(self, num_waiting: int) -> bool:
        config = self._config
        return num_waiting > config.prefetch_depth or num_waiting + len(self._running) > config.max_running

    def _dissolve_group(self) -> None:
        """Bring the group's members up to date and dissolve it, before their individual state is used."""
        if self._group is None:
            return
        self._group.settle(ANY_TOKEN)
        for sequence in self._running:
            self._queues.publish(sequence, sequence.num_computed)
        self._group = None

    def _will_be_shared(self, requests: Iterable[EngineRequest]) -> bool:
        """Return whether more than the order of arrival decides whose turn it is, with these requests."""
        return any(map(self.fair.makes_shared, requests))

    # ---- methods that use requests' individual state

    def queue(self, request: EngineRequest) -> None:
        if self._will_be_shared((request,)):
            self._dissolve_group()  # tenants are charged for what each request has got
        super().queue(request)

    def schedule(self) -> StepPlan:
        self._dissolve_group()
        return super().schedule()

    def cancel(self, request_id: str) -> None:
        self._dissolve_group()
        super().cancel(request_id)

    def num_output(self, request_id: str) -> int | None:
        self._dissolve_group()
        return super().num_output(request_id)

    def _fail_all(self, version: str, message: str, *, pinned: bool) -> None:
        self._dissolve_group()
        super()._fail_all(version, message, pinned=pinned)

    def stats(self, num_steps: int) -> EngineStats:
        self._dissolve_group()
        return super().stats(num_steps)

    def check_integrity(self) -> None:
        self._dissolve_group()
        super().check_integrity()


def _decodes(sequence: RequestState) -> bool:
    """Return whether a request decodes; the step that finishes a prompt also samples its first token, and
    does not count."""
    return sequence.num_remaining == 1 and sequence.num_unknown == 0 and sequence.num_output > 0
