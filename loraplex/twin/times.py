"""How long things take in a twin: what a modelled executor is asked instead of a device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from loraplex.core.cold_start import ColdStart
from loraplex.perf.cost_model import CostModel
from loraplex.perf.serving_costs import BatchFeatures
from loraplex.perf.slot_profile import SlotCosts
from loraplex.scheduling.plan import AdapterLoad, Chunk, StepPlan
from loraplex.scheduling.step_features import step_features


class Repeats(NamedTuple):
    """Steps that decode what one before them did: the seconds of the first, and what each after it adds."""

    first_s: float
    growth_s: float


class StepTimes(Protocol):
    """`num_waiting`: requests that were not in the step."""

    def step_s(self, plan: StepPlan, num_waiting: int) -> float:
        """Of a step that computes something."""
        ...

    def repeats(self, chunks: Sequence[Chunk], num_waiting: int) -> Repeats:
        """Of steps after one of these chunks, each of which computes the next token of every sequence. At
        least one of them is about to be taken."""
        ...

    def load_s(self, load: AdapterLoad) -> float:
        """Of bringing an adapter in, with nothing in its way."""
        ...

    def read_s(self, version: str) -> float:
        """Of reading an adapter from disk to the host's memory."""
        ...


class CostModelTimes:
    """By the cost model of our own engine. `adapter_bytes`: by version."""

    def __init__(self, model: CostModel, adapter_bytes: Mapping[str, int]) -> None:
        self._model = model
        self._bytes: Callable[[str], int] = adapter_bytes.__getitem__

    def step_s(self, plan: StepPlan, num_waiting: int) -> float:
        return self._model.step_s(step_features(plan.chunks, self._bytes))

    def repeats(self, chunks: Sequence[Chunk], num_waiting: int) -> Repeats:
        following = [chunk.following() for chunk in chunks]
        first_s = self._model.step_s(step_features(following, self._bytes))
        terms = self._model.step.terms
        growth_s = terms.decode_position_s * len(chunks) * self._model.corrections.step
        return Repeats(first_s, growth_s)

    def load_s(self, load: AdapterLoad) -> float:
        num_bytes = self._bytes(load.version)
        if load.source is not None:
            return self._model.copy_s(num_bytes)
        return self._model.read_s(num_bytes) + self._model.copy_s(num_bytes)

    def read_s(self, version: str) -> float:
        return self._model.read_s(self._bytes(version))


class SlotTimes:
    """By the costs of an engine with slots, which loads within its steps: `Scheduler` is told that every
    adapter is there. `order`: in which it goes through the adapters of a batch."""

    cold_start = ColdStart.OVERLAP

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
        return self._loads_s(versions) + self._compute_s(chunks, len(versions), num_waiting, further=0)

    def repeats(self, chunks: Sequence[Chunk], num_waiting: int) -> Repeats:
        versions = {chunk.adapter for chunk in chunks if chunk.adapter is not None}
        loads_s = self._loads_s(versions)  # none: but whoever is gone since the step before is older now
        first_s = loads_s + self._compute_s(chunks, len(versions), num_waiting, further=1)
        return Repeats(first_s, self._costs.decode.kv_token_s * len(chunks))

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

    def _compute_s(
        self, chunks: Sequence[Chunk], num_adapters: int, num_waiting: int, *, further: int
    ) -> float:
        """`further`: steps after the one that these chunks are of."""
        reads = not further and any(chunk.start == 0 for chunk in chunks)
        batch = BatchFeatures(
            num_requests=len(chunks),
            num_adapters=num_adapters,
            max_rank=self._max_rank,
            num_slots=self._num_slots,
            kv_tokens=sum(chunk.end for chunk in chunks) + further * len(chunks),
            num_tokens=sum(chunk.num_tokens for chunk in chunks) if reads else 0,
            num_waiting=num_waiting,
        )
        decide_s = self._costs.scheduler.predict(batch)
        return decide_s + (self._costs.prefill if reads else self._costs.decode).predict(batch)
