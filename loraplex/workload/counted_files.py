"""Reads traces of counts by source and window: Azure Functions (MAF) by minute, ServeGen by ten minutes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from loraplex.workload.counted import CountedTrace
from loraplex.workload.errors import WorkloadError
from loraplex.workload.gaps import GapKind, Gaps
from loraplex.workload.read_once import read_once
from loraplex.workload.table import Column, number, read_table, text, whole

_MINUTE_S: Final = 60
_SERVEGEN_WINDOW_S: Final = 600
_PATTERNS: Final = {"gamma": GapKind.GAMMA, "weibull": GapKind.WEIBULL, "exponential": GapKind.POISSON}

# (line, source, window, number of requests, gaps between them)
_Row = tuple[int, str, int, float, Gaps]


@read_once
def read_maf(path: Path) -> CountedTrace:
    """Read columns function, minute, count; absent rows are 0. A function is a source with Poisson calls."""
    columns = (
        Column(name="function", parse=text),
        Column(name="minute", parse=whole(0)),
        Column(name="count", parse=whole(0)),
    )
    poisson = Gaps.poisson()
    return _collected(
        path, _MINUTE_S, ((line, *row, poisson) for line, row in read_table(path, columns)), "minute"
    )


@read_once
def read_servegen(path: Path) -> CountedTrace:
    """Read columns client, t_s, rate, pattern, p1; absent rows are 0. A client is a source.

    p1 is the shape of the gaps' distribution. The published scale (p2) does not match the rate and is not
    used.
    """
    columns = (
        Column(name="client", parse=text),
        Column(name="t_s", parse=whole(0)),
        Column(name="rate", parse=number()),
        Column(name="pattern", parse=_pattern),
        Column(name="p1", parse=number(above=True)),
    )

    def rows() -> Iterator[_Row]:
        for line, (client, t_s, rate, kind, shape) in read_table(path, columns):
            if t_s % _SERVEGEN_WINDOW_S:
                raise WorkloadError(f"{path}:{line}: t_s must be a multiple of {_SERVEGEN_WINDOW_S}")
            try:
                gaps = Gaps(kind=kind, shape=shape)
            except WorkloadError as error:
                raise WorkloadError(f"{path}:{line}: p1: {error}") from error
            yield line, client, t_s // _SERVEGEN_WINDOW_S, rate * _SERVEGEN_WINDOW_S, gaps

    return _collected(path, _SERVEGEN_WINDOW_S, rows(), "t_s")


def _pattern(value: str) -> GapKind:
    try:
        return _PATTERNS[value.strip().lower()]
    except KeyError:
        raise ValueError(f"must be one of {', '.join(_PATTERNS)}") from None


def _collected(path: Path, window_s: int, rows: Iterator[_Row], time_column: str) -> CountedTrace:
    """Collect rows into a trace. Sources are numbered in order of appearance. Raises WorkloadError."""
    sources: dict[str, int] = {}
    seen: set[tuple[int, int]] = set()
    found: list[tuple[int, int, float, int, float]] = []
    for line, name, window, count, gaps in rows:
        source = sources.setdefault(name, len(sources))
        if (window, source) in seen:
            raise WorkloadError(f"{path}:{line}: {name} has a row for this {time_column} already")
        seen.add((window, source))
        if count > 0:
            found.append((window, source, count, gaps.kind, gaps.shape))
    if not found:
        raise WorkloadError(f"{path}: no requests in it")
    found.sort(key=lambda row: row[:2])
    windows, whose, counts, kinds, shapes = zip(*found, strict=True)
    return CountedTrace(
        names=tuple(sources),
        window_s=window_s,
        windows=np.array(windows, dtype=np.int64),
        sources=np.array(whose, dtype=np.int64),
        counts=np.array(counts, dtype=np.float64),
        kinds=np.array(kinds, dtype=np.int64),
        shapes=np.array(shapes, dtype=np.float64),
    )
