"""The queues of an engine: every request is in one of them, and holds what that says.

    add --> waiting --- run ---> running --- drop, fail ---> ended
               ^                    |                          ^
               |----- preempt ------'                          |
               `------------------ drop, fail -----------------'

A running request holds KV blocks, a pin on its adapter and one of the slots for adapters. A preempted one
keeps only the pin. A request that ends gives everything back at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from loraplex.core.clock import Clock
from loraplex.core.due_places import DuePlaces
from loraplex.core.request import FinishReason
from loraplex.scheduling.adapter_slots import AdapterSlots
from loraplex.scheduling.batching.batcher import Batcher
from loraplex.scheduling.fair_share import FairShare
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import TokenUpdate
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.request_table import RequestTable
from loraplex.scheduling.scheduler_view import check_integrity
from loraplex.scheduling.swapping import Swapping


class RequestQueues:
    """Holds the requests of one scheduler. `table`: all. `running`: in order of admission, or of
    `fair_victims`. `paused`: the running requests that the step being decided leaves out. `slots`: adapters
    of the running ones. `fair`: what each tenant got. `places`: how many requests each has. `failures`:
    requests that ended with an error since they were last taken. `is_settled`: the last step only decoded,
    and no waiting request can be admitted; unset by every event that may change that."""

    def __init__(
        self,
        memory: Memory,
        batcher: Batcher,
        swapping: Swapping | None,
        max_adapters: int | None,
        fair: FairShare,
        clock: Clock,
    ) -> None:
        self._memory = memory
        self._pool = memory.pool
        self._batcher = batcher
        self._swapping = swapping
        self.table = RequestTable()
        self.fair = fair
        self.places = DuePlaces(fair.share)
        self._clock = clock
        self.waiting = batcher.make_queue(fair, clock)
        self.running: list[RequestState] = []
        self.paused: list[RequestState] = []
        self.slots = AdapterSlots(max_adapters)
        self.failures: list[TokenUpdate] = []
        self.is_settled = False
        self.num_preemptions = 0

    def add(self, sequence: RequestState) -> None:
        """Queue a new request."""
        self.table.add(sequence)
        self.fair.arrives(sequence, self.waiting.tenants, self.running)
        self.waiting.append(sequence)
        self.places.change(sequence.request.tenant, 1, self._clock.now_s())
        self.is_settled = False

    def run(self, sequence: RequestState) -> None:
        """Let a waiting request run, which has its blocks. The caller removes it from `waiting`, where no
        request may leave during an iteration."""
        self.running.append(sequence)
        self.fair.admitted(sequence)
        self.slots.enter(sequence.adapter)

    def preempt(self, sequence: RequestState) -> None:
        """Let a running request wait, before all others. It is computed again later, or copied to the host
        and back."""
        self.running.remove(sequence)
        self.fair.settle((sequence,))
        self.slots.leave(sequence.adapter)
        if self._swapping is not None:
            # Also full blocks of steps in flight, which write them before a copy begins.
            self.publish(sequence, min(sequence.num_computed, len(sequence.token_ids)))
            self._swapping.swap_out(sequence)
        self._pool.release(sequence.block_ids)
        sequence.reset()
        self.waiting.append_front(sequence)
        self.num_preemptions += 1

    def publish(self, sequence: RequestState, num_computed: int) -> None:
        """Let other requests find the full blocks of a request's first `num_computed` tokens."""
        num_full = num_computed // self._pool.block_size
        if num_full > sequence.num_published:
            self._pool.publish(
                sequence.adapter,
                sequence.token_ids,
                sequence.block_ids,
                sequence.num_published,
                num_full,
                sequence.request.cache_salt,
            )
            sequence.num_published = num_full

    def drop(self, sequence: RequestState) -> None:
        """Remove a request from every queue, and give back its memory and pins."""
        self.table.remove(sequence)
        self.is_settled = False
        if sequence in self.waiting:
            self.waiting.give_up(sequence)
        else:
            self.running.remove(sequence)
            self.fair.settle((sequence,))
            self.slots.leave(sequence.adapter)
            self.waiting.ended(self._batcher.now_s)
        self.fair.ended(sequence)
        self.places.change(sequence.request.tenant, -1, self._clock.now_s())
        if self._swapping is not None:
            self._swapping.dropped(sequence)
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        if sequence.adapter is not None:
            self._memory.table.leave(sequence.adapter, pinned=sequence.pinned)
            sequence.pinned = False

    def fail(self, sequence: RequestState, message: str, *, param: str | None = None) -> None:
        """Drop a request, and keep the error for its client. `param`: the request's field at fault."""
        self.drop(sequence)
        self.failures.append(
            TokenUpdate(
                request_id=sequence.request_id,
                finish_reason=FinishReason.ERROR,
                error=message,
                error_param=param,
            )
        )

    def take_failures(self) -> list[TokenUpdate]:
        """Return the requests that ended with an error since the last call."""
        failures, self.failures = self.failures, []
        return failures

    def check_integrity(self, unknown: Mapping[int, int]) -> None:
        """Assert every invariant that ties queues, blocks and pins together. `unknown`: see
        `scheduler_view.check_integrity`."""
        waiting, running = self.waiting, self.running
        assert {each.request_id for each in (*waiting, *running)} == self.table.ids
        assert len(waiting) + len(running) == len(self.table)
        waiting.check_integrity()
        self.table.check_integrity()
        returning = () if self._swapping is None else self._swapping.returning
        check_integrity(waiting, running, self._memory, unknown, returning)
        if self._swapping is not None:
            self._swapping.check_integrity()
