"""The adapters an executor has in memory, and the loads that bring them there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loraplex.adapters.spec import AdapterSpec
from loraplex.engine.adapter_loader import AdapterLoader, Load, Read
from loraplex.engine.executor import AdapterEvent
from loraplex.kernels.lora import LoraWeights


class ResidentAdapters:
    """`weights` by version; it changes on the engine's own thread only, in `poll` and by its owner."""

    def __init__(self, num_threads: int = 1, on_thread: Callable[[], None] | None = None) -> None:
        """`on_thread`: what each of the threads that load does first."""
        self._loader = AdapterLoader(num_threads, on_thread)
        self.weights: dict[str, LoraWeights] = {}

    @property
    def num_pending(self) -> int:
        """Without those that are overdue."""
        return self._loader.num_pending

    @property
    def is_reading(self) -> bool:
        """Whether any thread may still write to the memory of its read; it may after `close`."""
        return self._loader.is_reading

    def load(self, sources: Sequence[AdapterSpec], load: Load) -> None:
        self._loader.submit(sources, load)

    def read(self, sources: Sequence[AdapterSpec], read: Read) -> None:
        """Only to where a load begins."""
        self._loader.submit_read(sources, read)

    def overdue(self, deadline_s: float) -> list[str]:
        """Versions that have been loaded or read for so long without an end."""
        return self._loader.overdue(deadline_s)

    def poll(self, timeout_s: float) -> list[AdapterEvent]:
        """Reads and loads that ended; waits for the first of them no longer than `timeout_s`."""
        events = []
        for result in self._loader.poll(timeout_s):
            if result.weights is not None:
                self.weights[result.version] = result.weights
            events.append(AdapterEvent(version=result.version, error=result.error, read=result.read))
        return events

    def close(self) -> None:
        """Wait for reads under way, but not for ever."""
        self._loader.close()
