"""Times of an engine with slots for the general simulator, against which the compiled one is checked."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from loraplex.perf.serving_costs import BatchFeatures
from loraplex.perf.slot_profile import SlotCosts
from loraplex.scheduling.plan import AdapterLoad, Chunk, StepPlan
from loraplex.twin.decode_group import DecodeGroup
from loraplex.twin.times import LoadInFlight, Repeats


class SlotTimes:
    """Times by the costs of an engine with slots, which loads within its steps: to the `Scheduler`, every
    adapter is resident. `order`: the order in which the engine processes the adapters of a batch."""

    def __init__(
        self,
        costs: SlotCosts,
        *,
        num_slots: int,
        max_rank: int,
        ranks: Mapping[str, int],
        order: Sequence[str],
    ) -> None:
        self._costs = costs
        self._num_slots = num_slots
        self._max_rank = max_rank
        self._ranks = ranks
        self._position = {version: place for place, version in enumerate(order)}
        self._slots: OrderedDict[str, None] = OrderedDict()
        self._known: set[str] = set()
        self.num_loads = 0

    def step_s(self, plan: StepPlan, num_waiting: int) -> float:
        chunks = plan.chunks
        versions = {chunk.adapter for chunk in chunks if chunk.adapter is not None}
        return self._loads_s(versions) + self._compute_s(chunks, len(versions), num_waiting)

    def repeats(self, group: DecodeGroup, num_waiting: int) -> Repeats:
        batch = BatchFeatures(
            num_requests=len(group),
            num_adapters=len(group.adapters),
            max_rank=self._max_rank,
            num_slots=self._num_slots,
            kv_tokens=group.positions,
            num_waiting=num_waiting,
        )
        first_s = self._costs.scheduler.predict(batch) + self._costs.decode.predict(batch)
        growth_s = self._costs.decode.kv_token_s * len(group)
        return Repeats(first_s, growth_s, once_s=self._loads_s(set(group.adapters)))

    def adapter_weight(self, version: str) -> int:
        return 0

    def beside_s(self, group: DecodeGroup, chunks: Sequence[Chunk]) -> float:
        raise AssertionError("an engine that reads prompts first does not decode beside them")

    def stall_s(self, step_s: float, loads: Sequence[tuple[str, LoadInFlight]]) -> float:
        return 0.0

    def load_s(self, load: AdapterLoad) -> float:
        return 0.0

    def read_s(self, version: str) -> float:
        return 0.0

    def _loads_s(self, versions: set[str]) -> float:
        seconds = 0.0
        for version in sorted(versions, key=self._position.__getitem__):
            if version not in self._slots:
                self.num_loads += 1
                cold = version not in self._known
                self._known.add(version)
                seconds += self._costs.load.predict(rank=self._ranks[version], from_disk=cold)
                if len(self._slots) >= self._num_slots:
                    self._slots.popitem(last=False)
            self._slots[version] = None
            self._slots.move_to_end(version)
        return seconds

    def _compute_s(self, chunks: Sequence[Chunk], num_adapters: int, num_waiting: int) -> float:
        reads = any(chunk.start == 0 for chunk in chunks)
        batch = BatchFeatures(
            num_requests=len(chunks),
            num_adapters=num_adapters,
            max_rank=self._max_rank,
            num_slots=self._num_slots,
            kv_tokens=sum(chunk.end for chunk in chunks),
            num_tokens=sum(chunk.num_tokens for chunk in chunks) if reads else 0,
            num_waiting=num_waiting,
        )
        decide_s = self._costs.scheduler.predict(batch)
        return decide_s + (self._costs.prefill if reads else self._costs.decode).predict(batch)
