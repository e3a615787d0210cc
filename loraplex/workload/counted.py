"""Traces that say how many requests each source made in each minute or so, not when in it."""

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
    """A row for each window and source with anything in it, in order of windows.

    Row i: `counts[i]` requests of source `sources[i]` in window `windows[i]`, spaced as kind and shape say.
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
        """Requests of each source."""
        totals = np.zeros(len(self.names))
        np.add.at(totals, self.sources, self.counts)
        return totals

    def part(self, chosen: IntArray) -> CountedTrace:
        """Return the trace of these sources alone, numbered anew in that order."""
        new = np.full(len(self.names), -1, dtype=np.int64)
        new[chosen] = np.arange(chosen.size)
        kept = new[self.sources] >= 0
        rows = {
            name: getattr(self, name)[kept] for name in ("windows", "sources", "counts", "kinds", "shapes")
        }
        rows["sources"] = new[rows["sources"]]
        return replace(self, names=tuple(self.names[place] for place in chosen.tolist()), **rows)

    def mean_rate(self, start_s: float, end_s: float) -> float:
        """Requests per second in that time; a window that lies in it partly counts in part."""
        begin_s = self.windows * self.window_s
        inside_s = np.minimum(begin_s + self.window_s, end_s) - np.maximum(begin_s, start_s)
        shares = np.maximum(inside_s, 0.0) / self.window_s
        return float((self.counts * shares).sum()) / (end_s - start_s)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CountedTraffic:
    """A trace from `start_s` on, each count times `scale`; source i is adapter `adapters[i]`.

    A window is made at once, so that is what it holds in memory.
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
    """Whole ones stay; of a fraction, that share of them is rounded up."""
    floors = np.floor(counts)
    return (floors + (rng.random(counts.size) < counts - floors)).astype(np.int64)


def _placed(rng: np.random.Generator, gaps: GapTable, counts: IntArray) -> tuple[FloatArray, IntArray]:
    """Where in the window (0 to 1) each request is, and whose it is.

    n gaps go once around the window, from anywhere in it: for Poisson gaps that is n uniform draws, and
    bursts do not gather where windows meet.
    """
    some = np.flatnonzero(counts)
    who = np.repeat(some, counts[some])
    if not who.size:
        return np.empty(0), who
    drawn = gaps.draw(rng, who)
    firsts = np.cumsum(counts[some]) - counts[some]
    # Very bursty gaps are so small that all of them may be 0 in floating point: one burst, then.
    drawn[firsts[np.add.reduceat(drawn, firsts) == 0]] = 1.0
    drawn /= np.repeat(np.add.reduceat(drawn, firsts), counts[some])
    # Every source adds up to 1, so those before it leave no trace in the fraction.
    starts = np.repeat(rng.random(some.size), counts[some])
    return (starts + np.cumsum(drawn)) % 1.0, who
