"""Plans sent to other shards: only the new blocks of each request's block list are sent.

A list grows with the request's context, and most steps append nothing to it. The other shards keep lists of
their own, which their block tables follow as those of shard 0 follow the scheduler's lists.
"""

from __future__ import annotations

from typing import NamedTuple

from loraplex.scheduling.plan import StepPlan


class SentPlan(NamedTuple):
    """A plan whose chunks have only their new blocks. `num_known`: for each chunk, the number of blocks of
    its request that the shards already have. `forgotten`: requests whose lists are not needed any more."""

    plan: StepPlan
    num_known: tuple[int, ...]
    forgotten: tuple[str, ...]


class PlanSender:
    """Tracks which block lists the other shards have.

    As with `BlockTables`, a different list object means that the request was preempted, and changes within a
    list must be announced by `forget_contents`.
    """

    def __init__(self) -> None:
        # By request: its list, and the number of its blocks that were sent.
        self._sent: dict[str, tuple[list[int], int]] = {}
        self._forgotten: list[str] = []

    def pack(self, plan: StepPlan) -> SentPlan:
        chunks, num_known = [], []
        for chunk in plan.chunks:
            blocks = chunk.block_ids
            sent, count = self._sent.get(chunk.request_id, (None, 0))
            if sent is not blocks or len(blocks) < count:
                count = 0
            chunks.append(chunk._replace(block_ids=blocks[count:]))
            num_known.append(count)
            self._sent[chunk.request_id] = blocks, len(blocks)
        forgotten, self._forgotten = self._forgotten, []
        return SentPlan(plan._replace(chunks=tuple(chunks)), tuple(num_known), tuple(forgotten))

    def forget(self, request_id: str) -> None:
        """Record that a request ended or was preempted. Unknown requests are ignored."""
        if self._sent.pop(request_id, None) is not None:
            self._forgotten.append(request_id)

    def forget_contents(self) -> None:
        """Record that blocks were moved: lists changed in place, and all of them are sent again."""
        self._sent = {request_id: ([], 0) for request_id in self._sent}


class PlanReceiver:
    """The block lists of another shard."""

    def __init__(self) -> None:
        self._lists: dict[str, list[int]] = {}

    def unpack(self, sent: SentPlan) -> StepPlan:
        """Return the plan as it was before packing. Its lists stay the same objects while they are appended
        to."""
        for request_id in sent.forgotten:
            del self._lists[request_id]
        chunks = []
        for chunk, num_known in zip(sent.plan.chunks, sent.num_known, strict=True):
            blocks = self._lists[chunk.request_id] if num_known > 0 else []
            assert len(blocks) == num_known, "the shards disagree on a request's blocks"
            blocks += chunk.block_ids
            self._lists[chunk.request_id] = blocks
            chunks.append(chunk._replace(block_ids=blocks))
        return sent.plan._replace(chunks=tuple(chunks))
