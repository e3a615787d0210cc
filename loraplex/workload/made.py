"""Workloads whose requests are drawn or read during iteration, not stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.workload.arrivals import BATCH
from loraplex.workload.errors import WorkloadError
from loraplex.workload.lengths import Lengths, cut
from loraplex.workload.popularity import Popularity
from loraplex.workload.replay import Rows, TraceRow
from loraplex.workload.request import WorkloadHeader, WorkloadRequest
from loraplex.workload.streams import Purpose, stream
from loraplex.workload.traffic import Traffic, progress_at

# Times are whole microseconds, here as in a file: a workload is the same whether it was saved or not.
_TIME_DIGITS: Final = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """A workload ends before `duration_s` and after `num_requests`, whichever comes first."""

    duration_s: float | None = None
    num_requests: int | None = None

    def of(self, requests: Iterator[WorkloadRequest]) -> Iterator[WorkloadRequest]:
        for request in islice(requests, self.num_requests):
            if self.duration_s is not None and request.arrival_s >= self.duration_s:
                return
            yield request


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeWorkload:
    """Traffic with lengths drawn for it. Every iteration with the same seed yields the same requests."""

    header: WorkloadHeader
    traffic: Traffic
    lengths: Lengths
    end: End
    seed: int

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return self.end.of(self._requests())

    def _requests(self) -> Iterator[WorkloadRequest]:
        draws = stream(self.seed, Purpose.LENGTHS)
        for times_s, adapters in self.traffic.batches(self.seed):
            yield from _requests(times_s, adapters, *self.lengths.draw(draws, times_s.size))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedWorkload:
    """A trace from `start_s` on, `speed` times as fast, with its own lengths (cut to the bounds).

    `popularity` draws adapters if the trace has none.
    """

    header: WorkloadHeader
    path: Path
    rows: Rows
    popularity: Popularity | None
    end: End
    seed: int
    start_s: float = 0.0
    speed: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return self.end.of(self._requests())

    def _requests(self) -> Iterator[WorkloadRequest]:
        rows = (row for row in self.rows() if row.arrival_s >= self.start_s)
        draws = stream(self.seed, Purpose.ADAPTERS)
        first = 0
        while batch := list(islice(rows, BATCH)):
            times_s = (np.array([row.arrival_s for row in batch]) - self.start_s) / self.speed
            adapters = self._adapters(draws, batch, first, times_s)
            prompts = cut(np.array([row.prompt_tokens for row in batch]), self.max_prompt_tokens)
            outputs = cut(np.array([row.output_tokens for row in batch]), self.max_output_tokens)
            yield from _requests(times_s, adapters, prompts, outputs)
            first += len(batch)

    def _adapters(
        self, rng: np.random.Generator, batch: list[TraceRow], first: int, times_s: FloatArray
    ) -> IntArray:
        if self.popularity is not None:
            progress = progress_at(times_s, self.header.duration_s)
            return self.popularity.draw(rng, first=first, progress=progress)
        for row in batch:
            if row.adapter is None or row.adapter >= self.header.num_adapters:
                raise WorkloadError(
                    f"{self.path}:{row.line}: adapter {row.adapter} is unknown: "
                    f"there are {self.header.num_adapters}, counted from 0"
                )
        return np.array([row.adapter for row in batch], dtype=np.int64)


def _requests(
    times_s: FloatArray, adapters: IntArray, prompts: IntArray, outputs: IntArray
) -> Iterator[WorkloadRequest]:
    columns = (np.round(times_s, _TIME_DIGITS), prompts, outputs, adapters)
    for arrival_s, prompt, output, adapter in zip(*(column.tolist() for column in columns), strict=True):
        yield WorkloadRequest(
            arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output, adapter=adapter
        )
