"""Traces that give each source's number of requests per window (such as a minute), not their times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.workload.gaps import GapTable
from loraplex.workload.streams import Purpose, stream
from loraplex.workload.traffic import Batch, in_order


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CountedTrace:
    """A trace of request counts: a row for each window and source with any request, in order of windows.

    Row i: `counts[i]` requests of source `sources[i]` in window `windows[i]`, with gaps of `kinds[i]`,
    `shapes[i]`.
    """

    names: tuple[str, ...]
    window_s: float
    windows: IntArray
    sources: IntArray
    counts: FloatArray
    kinds: IntArray
    shapes: FloatArray

    @property
    def end_s(self) -> float:
        return (int(self.windows[-1]) + 1) * self.window_s

    def totals(self) -> FloatArray:
        """Return the number of requests of each source."""
        totals = np.zeros(len(self.names))
        np.add.at(totals, self.sources, self.counts)
        return totals

    def part(self, chosen: IntArray) -> CountedTrace:
        """Return the trace of these sources alone, renumbered in that order."""
        new = np.full(len(self.names), -1, dtype=np.int64)
        new[chosen] = np.arange(chosen.size)
        kept = new[self.sources] >= 0
        rows = {
            name: getattr(self, name)[kept] for name in ("windows", "sources", "counts", "kinds", "shapes")
        }
        rows["sources"] = new[rows["sources"]]
        return replace(self, names=tuple(self.names[place] for place in chosen.tolist()), **rows)

    def mean_rate(self, start_s: float, end_s: float) -> float:
        """Return requests per second in this interval; a window that is partly inside counts in part."""
        begin_s = self.windows * self.window_s
        inside_s = np.minimum(begin_s + self.window_s, end_s) - np.maximum(begin_s, start_s)
        shares = np.maximum(inside_s, 0.0) / self.window_s
        return float((self.counts * shares).sum()) / (end_s - start_s)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CountedTraffic:
    """The traffic of a trace from `start_s` on, each count times `scale`; source i is adapter `adapters[i]`.

    Requests are drawn one window at a time, so memory holds one window.
    """

    trace: CountedTrace
    adapters: IntArray
    start_s: float = 0.0
    scale: float = 1.0

    def batches(self, seed: int) -> Iterator[Batch]:
        trace = self.trace
        rng = stream(seed, Purpose.ARRIVALS)
        bounds = np.flatnonzero(np.diff(trace.windows)) + 1
        for rows in np.split(np.arange(trace.windows.size), bounds):
            begin_s = float(trace.windows[rows[0]]) * trace.window_s - self.start_s
            if begin_s + trace.window_s <= 0:
                continue
            gaps = GapTable(trace.kinds[rows], trace.shapes[rows])
            places, who = _placed(rng, gaps, whole_counts(rng, trace.counts[rows] * self.scale))
            times_s, adapters = in_order(
                begin_s + places * trace.window_s, self.adapters[trace.sources[rows][who]]
            )
            since = np.searchsorted(times_s, 0.0)
            yield times_s[since:], adapters[since:]


def whole_counts(rng: np.random.Generator, counts: FloatArray) -> IntArray:
    """Round counts at random: a fraction is rounded up with that probability; whole numbers stay."""
    floors = np.floor(counts)
    return (floors + (rng.random(counts.size) < counts - floors)).astype(np.int64)


def _placed(rng: np.random.Generator, gaps: GapTable, counts: IntArray) -> tuple[FloatArray, IntArray]:
    """Return the position of each request in the window (0 to 1), and its row.

    n gaps go once around the window, from a random start: for Poisson gaps that is n uniform draws, and
    bursts do not gather at window borders.
    """
    some = np.flatnonzero(counts)
    who = np.repeat(some, counts[some])
    if not who.size:
        return np.empty(0), who
    drawn = gaps.draw(rng, who)
    firsts = np.cumsum(counts[some]) - counts[some]
    # Very bursty gaps may all be 0 in floating point: make them one burst.
    drawn[firsts[np.add.reduceat(drawn, firsts) == 0]] = 1.0
    drawn /= np.repeat(np.add.reduceat(drawn, firsts), counts[some])
    # Each source's gaps sum to 1, so in the running sum those of earlier sources do not change the fraction.
    starts = np.repeat(rng.random(some.size), counts[some])
    return (starts + np.cumsum(drawn)) % 1.0, who
