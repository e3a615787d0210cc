"""The adapters an executor has in memory, and the loads that bring them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loraplex.adapters.spec import AdapterSpec
from loraplex.engine.adapter_loader import AdapterLoader
from loraplex.engine.executor import AdapterEvent
from loraplex.kernels.lora import LoraWeights


class ResidentAdapters:
    """`weights` by version; it changes in `poll` and in `drop` only, on the engine's own thread."""

    def __init__(self, read: Callable[[AdapterSpec], LoraWeights]) -> None:
        self._loader = AdapterLoader(read)
        self.weights: dict[str, LoraWeights] = {}

    @property
    def num_pending(self) -> int:
        return self._loader.num_pending

    def load(self, sources: Sequence[AdapterSpec]) -> None:
        self._loader.submit(sources)

    def poll(self, timeout_s: float) -> list[AdapterEvent]:
        """Loads that ended; waits for the first of them no longer than `timeout_s`."""
        events = []
        for result in self._loader.poll(timeout_s):
            if result.weights is not None:
                self.weights[result.version] = result.weights
            events.append(AdapterEvent(version=result.version, error=result.error))
        return events

    def drop(self, version: str) -> LoraWeights:
        """Forget a version; its memory goes with the last reference to what is returned."""
        return self.weights.pop(version)

    def close(self) -> None:
        self._loader.close()
