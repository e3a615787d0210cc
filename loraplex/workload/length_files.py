"""Reads files of observed lengths: pairs, outputs alone, or quantiles by client, as ServeGen has them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from loraplex.workload.errors import WorkloadError
from loraplex.workload.lengths import EmpiricalTokens, Lengths, PairedLengths, QuantileLengths
from loraplex.workload.read_once import read_once
from loraplex.workload.table import Column, check_columns, column_names, number, read_table, whole

_LEVELS: Final = {
    "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0
}  # fmt: skip


@read_once
def read_lengths(path: Path) -> Lengths | EmpiricalTokens:
    """Read the lengths; the columns tell which of the three kinds the file is. EmpiricalTokens: outputs
    alone."""
    names = column_names(path)
    if any(name.startswith("in_p") for name in names):
        return _read_quantiles(path)
    if "output_tokens" in names and "prompt_tokens" not in names:
        return EmpiricalTokens(seen=_read_whole(path, ["output_tokens"])[:, 0])
    check_columns(path, names, ["prompt_tokens", "output_tokens"])
    pairs = _read_whole(path, ["prompt_tokens", "output_tokens"])
    return PairedLengths(prompts=pairs[:, 0], outputs=pairs[:, 1])


def _read_whole(path: Path, names: list[str]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    rows = [row for _, row in read_table(path, [Column(name=name, parse=whole(1)) for name in names])]
    if not rows:
        raise WorkloadError(f"{path}: no lengths in it")
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(names))


def _read_quantiles(path: Path) -> QuantileLengths:
    names = [f"{side}_{level}" for side in ("in", "out") for level in _LEVELS]
    rows = []
    for line, row in read_table(path, [Column(name=name, parse=number()) for name in names]):
        for low, high, name in zip(row, row[1:], names[1:], strict=False):
            if high < low and name != f"out_{next(iter(_LEVELS))}":
                raise WorkloadError(f"{path}:{line}: {name} {high:g} is less than the quantile before it")
        rows.append(row)
    if not rows:
        raise WorkloadError(f"{path}: no lengths in it")
    table = np.array(rows, dtype=np.float64).reshape(len(rows), 2, len(_LEVELS))
    return QuantileLengths(levels=np.array(list(_LEVELS.values())), prompts=table[:, 0], outputs=table[:, 1])
