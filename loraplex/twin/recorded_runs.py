"""Recorded runs of an engine with slots (CSV, one run per line): inputs apart from measurements.

A prediction is made from a `RunSetup` alone; measurements are kept in another object, so that they cannot
leak into a prediction.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex.core.errors import UserError
from loraplex.twin.scores import ttft_of_all
from loraplex.workload.errors import WorkloadError
from loraplex.workload.text_files import read_lines

_DEFAULT_DURATION_S: Final = 3600.0
_DEFAULT_MAX_RUNNING: Final = 2048
_KEY_FOLDER: Final = "digital_twin_modelling/real_results/"
"""One of the files names runs by their path below this folder, the other by the full path."""
_NEEDED: Final = (
    "model",
    "num_adapters",
    "adapter_ranks",
    "max_loras_gpu_slots",
    "max_lora_rank",
    "rate_values",
    "rate_counts",
)
_MEASURED: Final = ("status", "input_tok_s", "output_tok_s", "itl_mean_ms", "ttft_mean_ms")

_SENT: Final = "dt_arrivals"
"""Column with the number of requests sent: the authors' twin, which wrote it, draws the same ones as their
client."""


class RunsError(UserError):
    """A file of runs cannot be used; the message names file, line and column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSetup:
    """The inputs of a run. `rates`: (requests per second of each, number of adapters), slowest first.
    `ranks`: the ranks that adapters' ranks were drawn from. `dataset`: source of the lengths, None if not
    given."""

    key: str
    model: str
    ranks: tuple[int, ...]
    num_slots: int
    max_rank: int
    rates: tuple[tuple[float, int], ...]
    duration_s: float
    max_running: int
    dataset: str | None

    @property
    def num_adapters(self) -> int:
        return sum(count for _, count in self.rates)

    @property
    def offered_rps(self) -> float:
        return sum(rate * count for rate, count in self.rates)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measurements of a run: tokens and requests per second, and seconds. `ttft_s`: of completed
    requests; `ttft_all_s`: of all requests sent, see `scores.ttft_of_all`. None: not in the file."""

    input_tok_s: float
    output_tok_s: float
    itl_s: float
    ttft_s: float
    ttft_all_s: float | None = None
    completed_rps: float | None = None
    num_waiting: float | None = None

    @property
    def total_tok_s(self) -> float:
        return self.input_tok_s + self.output_tok_s


@dataclass(frozen=True, kw_only=True, slots=True)
class KvSample:
    """The KV tokens that an engine with these slots reported; it also reserves memory for the activations of
    `max_running` requests. `key`: key of the run that it served."""

    key: str
    model: str
    max_running: int
    num_slots: int
    max_rank: int
    kv_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsFile:
    """The runs of a file. `setups`: runs with request rates, each with a unique key; `num_others`: number of
    lines without. `measured`: by the setup's key, for runs that succeeded."""

    setups: tuple[RunSetup, ...]
    measured: Mapping[str, Measured]
    kv_samples: tuple[KvSample, ...]
    num_others: int


def read_runs(path: Path) -> RunsFile:
    """Read every line of a CSV file, compressed (.gz) or not."""
    setups: list[RunSetup] = []
    measured: dict[str, Measured] = {}
    kv_samples: list[KvSample] = []
    line_of: dict[str, int] = {}
    num_others = 0
    for line, row in _rows(path):
        try:
            if (sample := _kv_sample(row)) is not None:
                kv_samples.append(sample)
            if not row["rate_values"] or not row["max_loras_gpu_slots"]:
                num_others += 1
                continue
            setup = _setup(row)
            if (first := line_of.setdefault(setup.key, line)) != line:
                raise ValueError(f"the run of line {first} is called {setup.key!r} too")
            setups.append(setup)
            if (found := _measured(row, setup)) is not None:
                measured[setup.key] = found
        except ValueError as error:
            raise RunsError(f"{path}:{line}: {error}") from error
    return RunsFile(
        setups=tuple(setups), measured=measured, kv_samples=tuple(kv_samples), num_others=num_others
    )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        reader = csv.DictReader(line for _, line in read_lines(path))
        names = reader.fieldnames or []
        missing = [name for name in (*_NEEDED, *_MEASURED) if name not in names]
        if not {"key", "experiment"} & set(names):
            missing.insert(0, "key (or experiment)")
        if missing:
            raise RunsError(f"{path}: there is no column {', '.join(missing)}")
        for row in reader:
            if None in row or None in row.values():
                raise RunsError(f"{path}:{reader.line_num}: not as many fields as the header has")
            yield reader.line_num, row
    except WorkloadError as error:
        raise RunsError(f"{path}: cannot be read ({str(error).removeprefix(f'{path}: ')})") from error
    except csv.Error as error:
        raise RunsError(f"{path}: not a CSV file ({error})") from error


def _setup(row: Mapping[str, str]) -> RunSetup:
    counts = [_count("rate_counts", each) for each in row["rate_counts"].split()]
    values = [_number("rate_values", each) for each in row["rate_values"].split()]
    if len(counts) != len(values):
        raise ValueError(f"{len(values)} rate_values, but {len(counts)} rate_counts")
    if sum(counts) != _count("num_adapters", row["num_adapters"]):
        raise ValueError(f"rate_counts add up to {sum(counts)}, num_adapters is {row['num_adapters']}")
    if not any(values):
        raise ValueError("rate_values are all 0: no request ever comes")
    ranks = tuple(_count("adapter_ranks", each) for each in row["adapter_ranks"].split())
    if not ranks:
        raise ValueError("adapter_ranks is empty")
    if not (key := _key(row)):
        raise ValueError("the run has no name: key (or experiment) is empty")
    duration = row.get("total_time_s")
    max_running = row.get("max_num_seqs")
    return RunSetup(
        key=key,
        model=row["model"],
        ranks=ranks,
        num_slots=_count("max_loras_gpu_slots", row["max_loras_gpu_slots"]),
        max_rank=_count("max_lora_rank", row["max_lora_rank"]),
        rates=tuple(zip(values, counts, strict=True)),
        duration_s=_positive("total_time_s", duration) if duration else _DEFAULT_DURATION_S,
        max_running=_count("max_num_seqs", max_running) if max_running else _DEFAULT_MAX_RUNNING,
        dataset=row.get("dataset") or None,
    )


def _key(row: Mapping[str, str]) -> str:
    return (row.get("experiment") or row.get("key") or "").removeprefix(_KEY_FOLDER)


def _measured(row: Mapping[str, str], setup: RunSetup) -> Measured | None:
    if row["status"] != "ok" or not all(row[name] for name in _MEASURED):
        return None
    completed = row.get("completed_requests")
    duration_s = row.get("duration_s")
    waiting = row.get("mean_waiting")
    seconds = _positive("duration_s", duration_s) if duration_s else setup.duration_s
    sent = row.get(_SENT)
    ttft_s = _positive("ttft_mean_ms", row["ttft_mean_ms"]) / 1e3
    ttft_all_s = None
    if sent and completed:
        ttft_all_s = ttft_of_all(
            ttft_s,
            num_completed=_number("completed_requests", completed),
            num_sent=_count(_SENT, sent),
            duration_s=setup.duration_s,
        )
    return Measured(
        input_tok_s=_number("input_tok_s", row["input_tok_s"]),
        output_tok_s=_number("output_tok_s", row["output_tok_s"]),
        itl_s=_positive("itl_mean_ms", row["itl_mean_ms"]) / 1e3,
        ttft_s=ttft_s,
        ttft_all_s=ttft_all_s,
        completed_rps=_number("completed_requests", completed) / seconds if completed else None,
        num_waiting=_number("mean_waiting", waiting) if waiting else None,
    )


def _kv_sample(row: Mapping[str, str]) -> KvSample | None:
    tokens, slots, rank = row.get("kv_cache_tokens"), row["max_loras_gpu_slots"], row["max_lora_rank"]
    running = row.get("max_num_seqs")
    if (
        not (tokens and slots and rank and running and row["model"])
        or _number("kv_cache_tokens", tokens) == 0
    ):
        return None
    return KvSample(
        key=_key(row),
        model=row["model"],
        max_running=_count("max_num_seqs", running),
        num_slots=_count("max_loras_gpu_slots", slots),
        max_rank=_count("max_lora_rank", rank),
        kv_tokens=_count("kv_cache_tokens", tokens),
    )


def _number(column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{column} is {text!r}, not a number") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{column} is {text!r}, not a finite number of at least 0")
    return value


def _positive(column: str, text: str) -> float:
    value = _number(column, text)
    if value == 0:
        raise ValueError(f"{column} is {text!r}, not more than 0")
    return value


def _count(column: str, text: str) -> int:
    value = _number(column, text)
    if value != int(value) or value < 1:
        raise ValueError(f"{column} is {text!r}, not a whole number of at least 1")
    return int(value)


def without(runs: RunsFile, keys: Sequence[str]) -> RunsFile:
    """Return the file without the runs of these keys, including their memory sizes."""
    gone = set(keys)
    return RunsFile(
        setups=tuple(setup for setup in runs.setups if setup.key not in gone),
        measured={key: found for key, found in runs.measured.items() if key not in gone},
        kv_samples=tuple(sample for sample in runs.kv_samples if sample.key not in gone),
        num_others=runs.num_others,
    )
