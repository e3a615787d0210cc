"""Adapters on their way from host memory to the device, as its steps see them.

    held back --launch--> in flight --copies passed, no worker reads the host's copy--> arrived

A step may use an adapter that is in flight. The whole step waits for the copies that it needs, but not for
those of rows whose first layers CPU workers compute: these rows wait for themselves (`kernels.triton.gate`).
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from loraplex.engine.batch import BuiltBatch
from loraplex.engine.cuda.adapter_store import AdapterStore, Arrival, Transfer
from loraplex.engine.cuda.cpu_assist import AssistedSpan
from loraplex.engine.cuda.streams import Moment
from loraplex.engine.executor import AdapterEvent
from loraplex.engine.resident_adapters import ResidentAdapters
from loraplex.scheduling.plan import Chunk


class Arrivals:
    """Starts the copies of `store`. The weights are in `adapters` from then on."""

    def __init__(self, store: AdapterStore, adapters: ResidentAdapters, device: torch.device) -> None:
        self._store = store
        self._adapters = adapters
        self._device = device
        self._in_flight: dict[str, Arrival] = {}  # by version, in copy order
        self._held_back: list[Transfer] = []  # not needed by the step launched next
        self._assisted_steps: dict[str, Moment] = {}  # by version: the last step that workers assisted

    @property
    def versions(self) -> KeysView[str]:
        """The versions whose copies are in flight."""
        return self._in_flight.keys()

    @property
    def num_pending(self) -> int:
        """Number of copies that are in flight or held back."""
        return len(self._in_flight) + len(self._held_back)

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Start copies that take turns."""
        if transfers:
            for arrival in self._store.start(transfers):
                self._adapters.weights[arrival.transfer.spec.version] = arrival.weights
                self._in_flight[arrival.transfer.spec.version] = arrival

    def hold_back(self, transfers: Sequence[Transfer]) -> None:
        """Keep copies for `start_held_back`."""
        self._held_back += transfers

    def start_held_back(self) -> None:
        """Start the copies that were held back for a launch, one after the other: the adapter that requests
        have waited for longest arrives first."""
        transfers, self._held_back = self._held_back, []
        for transfer in transfers:
            self.start([transfer])

    def take_arrived(self) -> list[AdapterEvent]:
        """Return the copies that have ended since the last call."""
        arrived: dict[str, Arrival] = {}
        for version, arrival in self._in_flight.items():
            # Workers read its host memory until the end of the step.
            last_step = self._assisted_steps.get(version)
            if not arrival.done.passed or (last_step is not None and not last_step.passed):
                break  # those after it have not arrived either
            arrived[version] = arrival
        for version in arrived:
            del self._in_flight[version]
            self._assisted_steps.pop(version, None)
        return [
            AdapterEvent(version=version, copied=_copied(arrival)) for version, arrival in arrived.items()
        ]

    # ---- of a step

    def assisted_spans(self, chunks: Sequence[Chunk]) -> list[AssistedSpan]:
        """Return the prompts of a step whose first layers CPU workers may compute."""
        found: list[AssistedSpan] = []
        for chunk, first in _first_rows(chunks):
            arrival = self._in_flight.get(chunk.adapter or "")
            if arrival is not None and arrival.transfer.assisted_layers > 0 and chunk.num_tokens > 1:
                found.append(
                    AssistedSpan(
                        first=first,
                        count=chunk.num_tokens,
                        source=arrival.transfer.source,
                        arrival=arrival,
                        num_layers=arrival.transfer.assisted_layers,
                    )
                )
        return found

    def wanted_copies(
        self, built: BuiltBatch, assisted: Sequence[AssistedSpan]
    ) -> npt.NDArray[np.int64] | None:
        """Return the copies that the whole step waits for, by place (`kernels.triton.gate`); None for none.
        For adapters that only assisted spans use, it waits only for the tables."""
        arrivals = {
            version: self._in_flight[version]
            for version in (chunk.adapter for chunk in built.chunks)
            if version in self._in_flight
        }
        if not arrivals:
            return None
        if built.batch.span_starts_S.shape[0] == 0:  # it has no gates, and is short: it starts later
            for arrival in arrivals.values():
                arrival.done.hold_back()
            return None
        tickets = np.array([arrival.tickets for arrival in arrivals.values()], dtype=np.int64)
        spans = {span.first for span in assisted}
        others = {chunk.adapter for chunk, first in _first_rows(built.chunks) if first not in spans}
        tickets[[version not in others for version in arrivals], 1:] = 0
        wanted: npt.NDArray[np.int64] = tickets.max(axis=0)
        return wanted

    def step_assisted(self, spans: Sequence[AssistedSpan]) -> None:
        """Record that the step launched last has these spans: workers read their adapters on the host until
        it is over."""
        for span in spans:
            self._assisted_steps[span.arrival.transfer.spec.version] = Moment(self._device)


def _first_rows(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, int]]:
    """Yield each chunk with its first row in the step."""
    return zip(chunks, accumulate((chunk.num_tokens for chunk in chunks), initial=0), strict=False)


def _copied(arrival: Arrival) -> tuple[int, float] | None:
    seconds = arrival.done.seconds_since(arrival.transfer_batch.begun)
    return None if seconds is None else (arrival.transfer_batch.num_bytes, seconds)
