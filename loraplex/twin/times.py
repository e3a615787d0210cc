"""Durations in a twin: what the modelled executor uses instead of a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from loraplex.perf.cost_model import CostModel
from loraplex.perf.step_cost import StepFeatures
from loraplex.scheduling.plan import AdapterLoad, Chunk, StepPlan
from loraplex.scheduling.step_features import step_features
from loraplex.twin.decode_group import DecodeGroup
from loraplex.twin.quick_scheduler import StepChunks


class Repeats(NamedTuple):
    """Steps that decode the same requests: seconds of the first, seconds that each takes more than the one
    before, and seconds of work done once, in the first."""

    first_s: float
    growth_s: float
    once_s: float = 0.0

    def sum_s(self, num_steps: int) -> float:
        return self.once_s + num_steps * self.first_s + self.growth_s * num_steps * (num_steps - 1) / 2

    def steps_until(self, left_s: float, most: int) -> int:
        """Return how many steps begin before this time is over, at least one; the last one may end after
        it."""
        rest_s = left_s - self.once_s
        if rest_s <= 0:
            return 1
        if self.sum_s(most - 1) < left_s:
            return most
        # Solve `sum_s` for the number of steps, then correct rounding.
        linear = self.first_s - self.growth_s / 2
        guess = 2 * rest_s / (linear + math.sqrt(linear * linear + 2 * self.growth_s * rest_s))
        num_steps = max(min(int(guess), most), 1)
        while num_steps > 1 and self.sum_s(num_steps - 1) >= left_s:
            num_steps -= 1
        while num_steps < most and self.sum_s(num_steps) < left_s:
            num_steps += 1
        return num_steps


class LoadInFlight(NamedTuple):
    """An adapter that is loaded from `begin_s` to `end_s`, counted from a step's beginning. CPU workers
    compute its first `assisted_layers`, which are copied last, for a prompt of `num_tokens`."""

    begin_s: float
    end_s: float
    assisted_layers: int = 0
    num_tokens: int = 0


class StepTimes(Protocol):
    """Durations of steps, reads and loads. `num_waiting`: number of waiting requests, which are not in the
    step."""

    def step_s(self, plan: StepPlan, num_waiting: int) -> float:
        """Return the seconds of a step with chunks."""
        ...

    def repeats(self, group: DecodeGroup, num_waiting: int) -> Repeats:
        """Return the times of steps in which the group decodes. At least one of them is about to be
        simulated."""
        ...

    def beside_s(self, group: DecodeGroup, chunks: Sequence[Chunk]) -> float:
        """Return the seconds of a step in which the group decodes beside these chunks."""
        ...

    def adapter_weight(self, version: str) -> int:
        """Return an adapter's weight, which a decode group sums up over its requests."""
        ...

    def stall_s(self, step_s: float, loads: Sequence[tuple[str, LoadInFlight]]) -> float:
        """Return how much longer a step takes because of loads in flight, given by version."""
        ...

    def load_s(self, load: AdapterLoad) -> float:
        """Return the seconds of a load on an idle bus."""
        ...

    def read_s(self, version: str) -> float:
        """Return the seconds to read an adapter's file into host memory."""
        ...

    def copy_s(self, num_bytes: int) -> float:
        """Return the seconds of copies of KV blocks in one direction on an idle bus."""
        ...


class CostModelTimes:
    """Times by the cost model of our own engine. `adapter_bytes`: bytes of each version. `merge_bytes`: bytes
    of the weights that each is merged into, where that is simulated. `num_workers`: CPU workers."""

    def __init__(
        self,
        model: CostModel,
        adapter_bytes: Mapping[str, int],
        merge_bytes: Mapping[str, int] | None = None,
        num_workers: int = 0,
    ) -> None:
        self._model = model
        self._merge_bytes = merge_bytes or {}
        self._num_workers = num_workers
        self._bytes: Callable[[str], int] = adapter_bytes.__getitem__
        self._step_s = model.step_s
        self._position_s = model.step.terms.decode_position_s * model.corrections.step

    def adapter_weight(self, version: str) -> int:
        """Return an adapter's bytes."""
        return self._bytes(version)

    def step_s(self, plan: StepPlan, num_waiting: int) -> float:
        chunks: Sequence[Chunk] = plan.chunks
        if isinstance(chunks, StepChunks):
            features = chunks.features(self._bytes)
        else:
            features = step_features(chunks, self._bytes)
        merge_s = 0.0 if plan.merge is None else self._model.merge_s(self._merge_bytes[plan.merge])
        return merge_s + self._step_s(features if plan.merged is None else features.on_merged_weights())

    def repeats(self, group: DecodeGroup, num_waiting: int) -> Repeats:
        num_decodes = len(group)
        features = StepFeatures(
            num_decodes,
            0,
            0,
            group.positions,
            0,
            len(group.adapters),
            group.weight,
            group.row_weight,
            group.largest_weight,
            group.num_adapter_rows,
        )
        return Repeats(self._step_s(features), self._position_s * num_decodes)

    def beside_s(self, group: DecodeGroup, chunks: Sequence[Chunk]) -> float:
        """Count all chunks as `step_features` does. Positional arguments: keywords take twice as long."""
        num_decodes, positions, num_tokens, pairs = len(group), group.positions, 0, 0.0
        num_bytes, row_bytes, others = group.weight, group.row_weight, set[str]()
        largest, num_adapter_rows = group.largest_weight, group.num_adapter_rows
        for chunk in chunks:
            count, version = chunk.num_tokens, chunk.adapter
            if count == 1:
                num_decodes += 1
                positions += chunk.end
            else:
                num_tokens += count
                pairs += count * (chunk.start + count / 2)
            if version is not None:
                size = self._bytes(version)
                row_bytes += count * size
                num_adapter_rows += count
                if size > largest:
                    largest = size
                if version not in group.adapters and version not in others:
                    others.add(version)
                    num_bytes += size
        return self._step_s(
            StepFeatures(
                num_decodes,
                len(group) + len(chunks) - num_decodes,
                num_tokens,
                positions,
                pairs,
                len(group.adapters) + len(others),
                num_bytes,
                row_bytes,
                largest,
                num_adapter_rows,
            )
        )

    def stall_s(self, step_s: float, loads: Sequence[tuple[str, LoadInFlight]]) -> float:
        """Assume that all layers take equally long."""
        if not loads:
            return 0.0
        num_layers = self._model.subject.num_layers
        delay_s = sum(self._assist_s(version, load) for version, load in loads)
        # Layers after the assisted ones are copied first, and reached later.
        first_s = last_s = 0.0
        for _, (begin_s, end_s, assisted, _) in loads:
            layer_s = (end_s - begin_s) / num_layers
            reached_s = step_s * assisted / num_layers + delay_s
            if assisted < num_layers:
                first_s = max(first_s, begin_s + layer_s - reached_s)
                last_s = max(last_s, end_s - assisted * layer_s - delay_s)
        return delay_s + self._model.even_stall_s(first_s, last_s, step_s)

    def _assist_s(self, version: str, load: LoadInFlight) -> float:
        """Return the seconds that CPU workers add to a step."""
        if load.assisted_layers == 0 or load.num_tokens == 0:
            return 0.0
        layer_s = self._model.assist_layer_s(
            self._bytes(version), num_tokens=load.num_tokens, num_workers=self._num_workers
        )
        return load.assisted_layers * layer_s

    def load_s(self, load: AdapterLoad) -> float:
        num_bytes = self._bytes(load.version)
        if load.source is not None:
            return self._model.copy_s(num_bytes)
        return self._model.read_s(num_bytes) + self._model.copy_s(num_bytes)

    def read_s(self, version: str) -> float:
        """Return the seconds to read a file that is in the page cache."""
        return self._model.read_s(self._bytes(version))

    def copy_s(self, num_bytes: int) -> float:
        return self._model.copy_s(num_bytes)
