"""Reads a demand: a table of adapters with their ranks and rates, or a workload file."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from loraplex.planner.demand import MAX_RATE_RPS, AdapterDemand, Demand, PlanError
from loraplex.workload.jsonl import WorkloadFile
from loraplex.workload.text_files import read_lines

COLUMNS: Final = ("name", "rank", "rate_rps")


def read_table(path: Path, *, prompt_tokens: float, output_tokens: float) -> Demand:
    """Read a CSV file with the columns name, rank and rate_rps. The lengths are those of all requests."""
    rows = csv.DictReader((line for _, line in read_lines(path)))
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise PlanError(
            f"{path}: there is no column {missing[0]!r}; its first line must name the columns "
            f"{', '.join(COLUMNS)}, and each line after it describe an adapter"
        )
    adapters: dict[str, AdapterDemand] = {}
    for number, row in enumerate(rows, start=2):
        adapter = _adapter_of(row, f"{path}, line {number}")
        if adapter.name in adapters:
            raise PlanError(f"{path}, line {number}: adapter {adapter.name!r} is there twice; leave one out")
        adapters[adapter.name] = adapter
    if not adapters:
        raise PlanError(f"{path}: there is no adapter in it; add lines with a name, a rank and a rate")
    return Demand(adapters=tuple(adapters.values()), prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def _adapter_of(row: Mapping[str, str | None], where: str) -> AdapterDemand:
    name = (row["name"] or "").strip()
    if not name:
        raise PlanError(f"{where}: the adapter has no name; give it one")
    if not name.isprintable() or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise PlanError(
            f"{where}: {name!r} is no name of an adapter: it leads out of their folder, or has characters "
            "that cannot be printed; rename it"
        )
    rank, rate = (_number(row[column], column, f"{where}, adapter {name!r}") for column in COLUMNS[1:])
    if not rank.is_integer() or rank < 1:
        raise PlanError(
            f"{where}: rank {row['rank']} of adapter {name!r} is not a whole number above 0; give the 'r' of "
            "its adapter_config.json"
        )
    if rate < 0:
        raise PlanError(f"{where}: the rate of adapter {name!r} is below 0; give its requests per second")
    if rate > MAX_RATE_RPS:
        raise PlanError(
            f"{where}: adapter {name!r} has {rate:g} requests per second, more than any GPU serves; give its "
            "requests per second"
        )
    return AdapterDemand(name=name, rank=int(rank), rate_rps=rate)


def _number(text: str | None, column: str, where: str) -> float:
    if text is None or not text.strip():
        raise PlanError(f"{where}: there is no {column}; every adapter needs one")
    try:
        found = float(text)
    except ValueError:
        raise PlanError(f"{where}: {column} {text.strip()!r} is not a number") from None
    if not math.isfinite(found):
        raise PlanError(f"{where}: {column} {text.strip()!r} is not finite")
    return found


def read_workload_demand(path: Path) -> Demand:
    """Return the demand that a workload file shows: each adapter's requests over its whole time."""
    file = WorkloadFile(path)
    if file.header is None:
        raise PlanError(
            f"{path}: it has no header, which would say the adapters' ranks; make one with `loraplex "
            "workload make`, or give a table of adapters (--adapters FILE.csv)"
        )
    counts: Counter[int] = Counter()
    num_prompt, num_output, last_s = 0, 0, 0.0
    for each in file:
        counts[each.adapter] += 1
        num_prompt += each.prompt_tokens
        num_output += each.output_tokens
        last_s = each.arrival_s
    total, duration_s = counts.total(), file.header.duration_s or last_s
    if total == 0 or duration_s <= 0:
        raise PlanError(f"{path}: it has too few requests to tell rates from; give a longer workload")
    names = file.header.names or [f"adapter-{number}" for number in range(len(file.header.ranks))]
    return Demand(
        adapters=tuple(
            AdapterDemand(name=name, rank=rank, rate_rps=counts[number] / duration_s)
            for number, (name, rank) in enumerate(zip(names, file.header.ranks, strict=True))
        ),
        prompt_tokens=num_prompt / total,
        output_tokens=num_output / total,
    )
