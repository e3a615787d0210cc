"""Plans as other shards get them."""

from __future__ import annotations

import pickle
import random

from loraplex.engine.parallel.shard_plans import PlanReceiver, PlanSender, SentPlan
from loraplex.scheduling.plan import Chunk, StepPlan


def plan_of(**lists: list[int]) -> StepPlan:
    return StepPlan(
        chunks=tuple(
            Chunk(request_id=name, adapter=None, start=0, token_ids=[1], block_ids=blocks, samples=True)
            for name, blocks in lists.items()
        )
    )


class Wire:
    """A sender and a receiver in another process."""

    def __init__(self) -> None:
        self.sender, self.receiver = PlanSender(), PlanReceiver()

    def carry(self, plan: StepPlan) -> tuple[SentPlan, StepPlan]:
        sent: SentPlan = pickle.loads(pickle.dumps(self.sender.pack(plan)))
        received = self.receiver.unpack(sent)
        assert received == plan
        return sent, received


def test_only_new_blocks_are_sent_and_appended_where_the_others_are() -> None:
    wire, blocks = Wire(), list(range(100))
    _, first = wire.carry(plan_of(a=blocks))
    blocks.append(7)
    sent, second = wire.carry(plan_of(a=blocks))
    assert sent.plan.chunks[0].block_ids == [7]
    assert second.chunks[0].block_ids is first.chunks[0].block_ids
    sent, _ = wire.carry(plan_of(a=blocks))
    assert sent.plan.chunks[0].block_ids == []


def test_another_list_or_blocks_that_were_moved_are_sent_anew() -> None:
    wire, blocks = Wire(), [1, 2, 3]
    _, first = wire.carry(plan_of(a=blocks))
    blocks[:] = [4, 2, 3]
    wire.sender.forget_contents()
    _, second = wire.carry(plan_of(a=blocks))
    assert second.chunks[0].block_ids is not first.chunks[0].block_ids, "tables would keep what was"
    wire.carry(plan_of(a=[5, 6, 7]))


def test_lists_of_requests_that_ended_are_not_kept() -> None:
    wire = Wire()
    wire.carry(plan_of(a=[1], b=[2]))
    wire.sender.forget_contents()
    wire.sender.forget("a")
    wire.sender.forget("a")
    wire.sender.forget("never in a step")
    wire.carry(plan_of(b=[2]))
    assert wire.receiver._lists.keys() == wire.sender._sent.keys() == {"b"}
    wire.sender.forget("b")
    wire.carry(plan_of(b=[3]))  # another request of this name


def test_every_plan_arrives_as_it_was_whatever_happened_before() -> None:
    rng, wire = random.Random(0), Wire()
    lists: dict[str, list[int]] = {}
    for _ in range(1000):
        name, action = f"r{rng.randrange(6)}", rng.random()
        if action < 0.1:
            lists.pop(name, None)
            wire.sender.forget(name)
        elif action < 0.15:
            for blocks in lists.values():
                blocks[:] = [block + 1 for block in blocks]
            wire.sender.forget_contents()
        else:
            lists.setdefault(name, []).append(rng.randrange(100))
        wire.carry(plan_of(**{name: lists[name] for name in lists if rng.random() < 0.7}))
