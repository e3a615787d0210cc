"""The adapters an executor has in memory, and their loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loraplex.adapters.spec import AdapterSpec
from loraplex.engine.adapter_loader import AdapterLoader, Load, Read
from loraplex.engine.executor import AdapterEvent
from loraplex.kernels.lora import LoraWeights


class ResidentAdapters:
    """Weights of loaded adapters by version. `weights` changes only on the engine's own thread, in `poll` and
    by its owner."""

    def __init__(self, num_threads: int = 1, on_thread: Callable[[], None] | None = None) -> None:
        """`on_thread`: called first by each loader thread."""
        self._loader = AdapterLoader(num_threads, on_thread)
        self.weights: dict[str, LoraWeights] = {}

    @property
    def num_pending(self) -> int:
        """Number of loads in flight, without overdue ones."""
        return self._loader.num_pending

    @property
    def is_reading(self) -> bool:
        """Return whether any thread may still write to the memory of its read, even after `close`."""
        return self._loader.is_reading

    def load(self, sources: Sequence[AdapterSpec], load: Load) -> None:
        self._loader.submit(sources, load)

    def read(self, sources: Sequence[AdapterSpec], read: Read) -> None:
        """Start a read only, without the load that follows it."""
        self._loader.submit_read(sources, read)

    def overdue(self, deadline_s: float) -> list[str]:
        """Return the versions whose load or read has taken longer than `deadline_s`."""
        return self._loader.overdue(deadline_s)

    def poll(self, timeout_s: float) -> list[AdapterEvent]:
        """Return the reads and loads that ended; wait up to `timeout_s` for the first of them."""
        events = []
        for result in self._loader.poll(timeout_s):
            if result.weights is not None:
                self.weights[result.version] = result.weights
            events.append(AdapterEvent(version=result.version, error=result.error, read=result.read))
        return events

    def close(self) -> None:
        """Wait for reads in flight, for a limited time."""
        self._loader.close()
