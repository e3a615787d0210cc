"""Reads how popular the sources of a trace were, from any of the trace formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from loraplex.workload.counted_files import read_maf, read_servegen
from loraplex.workload.errors import WorkloadError
from loraplex.workload.jsonl import WorkloadFile
from loraplex.workload.read_once import read_once
from loraplex.workload.table import Column, column_names, number, read_table, text


@read_once
def read_totals(path: Path) -> list[float]:
    """Return each source's requests from a MAF file (counts or totals), ServeGen, VTC, or a workload file."""
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        return _counted(str(request.adapter) for request in WorkloadFile(path))
    names = column_names(path)
    if "minute" in names:
        return [float(total) for total in read_maf(path).totals()]
    if "client" in names:
        return [float(total) for total in read_servegen(path).totals()]
    if "adapter" in names:
        return _counted(row[0] for _, row in read_table(path, (Column(name="adapter", parse=text),)))
    if "total" in names:
        return [row[0] for _, row in read_table(path, (Column(name="total", parse=number()),))]
    raise WorkloadError(
        f"{path}:1: there is no popularity in {', '.join(names)}; one of these columns would tell: "
        "total, minute (MAF), client (ServeGen), adapter (VTC)"
    )


def _counted(names: Iterable[str]) -> list[float]:
    return [float(count) for count in Counter(names).values()]
