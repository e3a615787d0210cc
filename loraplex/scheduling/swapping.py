"""Decides which keys and values are copied to the host tier, and back to the device.

    running --preempt--> waiting --fetch--> returning --copies ended--> returning --admit--> running
                            ^                   |                           |
                            `------ give up (memory is short) --------------'

Out: a preempted request's full blocks, if copies pay (`swap_cost`), and cached blocks that are about to be
evicted (`victims.blocks_to_save`). Until its copy has ended, a block is locked: the request that needed
memory gets no token until then, unless the blocks released at once are enough.

In: a waiting request whose prefix continues on the host *returns*. It holds the blocks of its prefix, some of
which are being copied to the device, until it is admitted. It loses them when memory is short, before any
running request is preempted; what was copied stays in the prefix cache until it is evicted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from loraplex.perf.drift import DriftWatch
from loraplex.scheduling.blocks import Contents
from loraplex.scheduling.host_kv import HostKV
from loraplex.scheduling.memory import Memory
from loraplex.scheduling.plan import BlockCopy
from loraplex.scheduling.request_state import RequestState
from loraplex.scheduling.swap_cost import SwapSize, copying_pays
from loraplex.scheduling.victims import blocks_to_save

_MAX_SAVED: Final = 16
"""Most cached blocks that are copied to the host at a time: they cannot be evicted meanwhile."""


class SwapOrders(NamedTuple):
    """Copies that were decided since the last step, as a plan holds them."""

    outs: tuple[BlockCopy, ...] = ()
    ins: tuple[BlockCopy, ...] = ()


@dataclass(slots=True)
class _Return:
    """A waiting request that holds its prefix. `pending`: blocks that are still being copied to.
    `num_copied`: blocks that came from the host."""

    pending: set[int] = field(default_factory=set)
    num_copied: int = 0


class Swapping:
    """`returning`: waiting requests that hold blocks."""

    def __init__(self, memory: Memory, host: HostKV, costs: DriftWatch | None) -> None:
        self._memory = memory
        self._pool = memory.pool
        self._host = host
        self._costs = costs
        self._returns: dict[RequestState, _Return] = {}
        self._waits_for: dict[int, RequestState] = {}  # by block that is being copied to
        self._outs: list[BlockCopy] = []
        self._ins: list[BlockCopy] = []
        self._num_leaving = 0  # copies to the host under way
        self._num_evicted = 0  # when cached blocks were last saved

    @property
    def returning(self) -> Collection[RequestState]:
        return self._returns.keys()

    def take_orders(self) -> SwapOrders:
        """Return the copies decided since the last call, after saving what is evicted next."""
        self._save_cached()
        orders = SwapOrders(tuple(self._outs), tuple(self._ins))
        self._outs, self._ins = [], []
        return orders

    # ---- to the host

    def swap_out(self, sequence: RequestState) -> None:
        """Begin to copy a preempted request's published blocks to the host, if that pays. The caller releases
        them afterwards."""
        kept = self._pool.published(sequence.block_ids)
        for contents in reversed(kept):  # the last block is evicted first: a prefix without it is of use
            self._host.touch(contents.node)
        missing = [contents for contents in kept if not self._host.holds(contents.node)]
        if missing and self._pays(sequence, len(kept), num_out=len(missing)):
            self._order_out(missing, spared={contents.node for contents in kept})

    def _save_cached(self) -> None:
        """Begin to copy cached blocks to the host that are evicted next, if memory is short and nothing else
        is copied there."""
        if self._pool.num_evicted == self._num_evicted or self._num_leaving > 0:
            return
        self._num_evicted = self._pool.num_evicted
        missing: dict[int, Contents] = {}
        for node in blocks_to_save(self._pool.cached, self._host.holds):
            chain = self._pool.chain(node)  # without the blocks before it, it could not be found again
            missing |= {each.node: each for each in chain if not self._host.holds(each.node)}
            if len(missing) >= _MAX_SAVED:
                break
        self._order_out(list(missing.values())[:_MAX_SAVED], spared=missing)

    def _order_out(self, missing: Iterable[Contents], spared: Collection[int]) -> None:
        """Begin copies in this order, as far as the host has room without evicting `spared` nodes."""
        for node, block in missing:
            assert block is not None
            number = self._host.reserve(node, *self._pool.identity(block), spared)
            if number is None:
                return
            self._pool.lock(block)
            self._num_leaving += 1
            self._outs.append(BlockCopy(block, number))

    # ---- to the device

    def awaits_host(self, sequence: RequestState) -> bool:
        """Return whether the prefix of a waiting request continues on the host."""
        return sequence in self._returns or any(each.block is None for each in self._find(sequence))

    def fetch(self, sequence: RequestState, *, num_running: int, num_promised: int) -> bool:
        """Return whether a waiting request that could be admitted has to wait for copies to the device. They
        are begun here, where there is memory for all that the request has to compute beside the blocks
        promised to others."""
        state = self._returns.get(sequence)
        if state is not None:
            return bool(state.pending)
        found = self._find(sequence)
        on_host = [each.node for each in found if each.block is None]
        if not on_host:
            return False
        if any(self._host.is_arriving(node) for node in on_host):
            return True  # for another request
        first = next(index for index, each in enumerate(found) if each.block is None)
        if not self._pays(sequence, len(found) - first, first=first, num_in=len(on_host)):
            return False
        held = [each.block for each in found if each.block is not None]
        self._pool.share(held)
        whole = self._pool.blocks_for(len(sequence.token_ids)) - len(held)
        is_alone = num_running == 0 and not self._returns
        needed = len(on_host) + 1 if is_alone else num_promised + whole
        blocks = self._pool.allocate(len(on_host)) if needed <= self._pool.num_obtainable else None
        if blocks is None:
            self._pool.release(held)
            return False
        self._order_in(sequence, found, blocks)
        return True

    def admitted(self, sequence: RequestState) -> None:
        """Release what a request held that is admitted now, and has its prefix from the cache."""
        state = self._returns.pop(sequence, None)
        if state is not None:
            self._host.num_hits += state.num_copied
            self._release(sequence)

    def dropped(self, sequence: RequestState) -> None:
        """Record that a request ended; the caller releases its blocks."""
        self._returns.pop(sequence, None)

    def give_up_last(self, first: float = -math.inf) -> bool:
        """Release what the last returning request in the queue holds, if its queue position is at least
        `first`. Return False if there is none."""
        last = max(self._returns, key=lambda each: each.queue_position, default=None)
        if last is None or last.queue_position < first:
            return False
        del self._returns[last]
        self._release(last)
        return True

    def _find(self, sequence: RequestState) -> list[Contents]:
        if sequence.request.params.prompt_logprobs is not None:
            return []
        return self._pool.find(sequence.adapter, sequence.token_ids, sequence.request.cache_salt)

    def _order_in(self, sequence: RequestState, found: Iterable[Contents], blocks: Iterable[int]) -> None:
        """Begin to copy what of a prefix is on the host to these blocks."""
        state, targets = _Return(), iter(blocks)
        self._returns[sequence] = state
        sequence.block_ids = []
        for node, block in found:
            if block is None:
                block = next(targets)
                self._ins.append(BlockCopy(block, self._host.begin_in(node)))
                self._pool.lock(block)
                self._waits_for[block] = sequence
                state.pending.add(block)
                state.num_copied += 1
            sequence.block_ids.append(block)

    def _release(self, sequence: RequestState) -> None:
        blocks, sequence.block_ids = sequence.block_ids, []
        self._pool.release(blocks)

    # ---- reports from the executor

    def ended_out(self, copies: Iterable[BlockCopy], *, failed: bool) -> None:
        """Record that copies to the host have ended."""
        for block, number in reversed(list(copies)):  # the last is released, and evicted, first
            self._host.copied_out(number, failed=failed)
            self._num_leaving -= 1
            self._pool.unlock(block)

    def ended_in(self, copies: Iterable[BlockCopy], *, failed: bool) -> None:
        """Record that copies to the device have ended. After a failed one, the request computes its tokens
        again."""
        for block, number in reversed(list(copies)):
            contents = self._host.copied_in(number, failed=failed)
            if contents is not None:
                self._pool.adopt(block, contents)
            self._pool.unlock(block)
            sequence = self._waits_for.pop(block)
            state = self._returns.get(sequence)
            if state is None or block not in state.pending:
                continue
            state.pending.remove(block)
            if failed:
                self.dropped(sequence)
                self._release(sequence)

    # ---- costs

    def _pays(
        self,
        sequence: RequestState,
        num_blocks: int,
        *,
        num_out: int = 0,
        num_in: int | None = None,
        first: int = 0,
    ) -> bool:
        """Return whether copies pay against computing `num_blocks` blocks after the `first` ones. `num_in`:
        by default all of them."""
        version, size = sequence.adapter, self._pool.block_size
        return copying_pays(
            SwapSize(
                out_bytes=num_out * self._host.block_bytes,
                in_bytes=(num_blocks if num_in is None else num_in) * self._host.block_bytes,
                num_tokens=num_blocks * size,
                start=first * size,
                adapter_bytes=0 if version is None else self._memory.table.num_bytes(version),
            ),
            None if self._costs is None else self._costs.model,
        )

    def check_integrity(self) -> None:
        """Assert that requests wait for exactly the copies to the device that are under way. For tests,
        between steps."""
        assert not self._outs
        assert not self._ins
        assert len(self._waits_for) + self._num_leaving == self._pool.num_locked
        pending = {block for state in self._returns.values() for block in state.pending}
        assert pending <= self._waits_for.keys()
