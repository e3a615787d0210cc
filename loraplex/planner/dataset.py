"""Simulated runs to train a surrogate on, in a file that grows and is continued where it ended.

    {"version": 1, "kind": "planner dataset", "profile": NAME, ..., "columns": ["point", ...]}
    [69214, 16.0, 6.4, 0.3, 32.0, 18.5, 9.8, 8.0, 3066.2, 3071.5, 0]
    ...

Points of the grid come in an order drawn from the seed, so that the first rows are a sample of the whole
grid, and asking for more rows later continues the same file.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from loraplex.core.errors import StorageError
from loraplex.core.progress import Report
from loraplex.perf.slot_profile import SlotProfile
from loraplex.planner.demand import Demand, PlanError
from loraplex.planner.features import (
    FEATURE_UNITS,
    NUM_PAPER_FEATURES,
    PAPER_FEATURES,
    features_of,
    with_ratios,
)
from loraplex.planner.fingerprint import fingerprint
from loraplex.planner.grid import Drawn, GridPoint, draw, scaled_grid, whole_grid
from loraplex.planner.traffic import LengthsOf
from loraplex.planner.trained_on import TrainedOn
from loraplex.planner.trial import most_of_base_model
from loraplex.twin.predict_run import Predicted, predict_requests, run_limits
from loraplex.twin.run_workload import AdapterMix, Lengths, draw_requests
from loraplex.twin.slot_state import Flags, Floats, Limits

VERSION: Final = 2
KIND: Final = "planner dataset"
DURATION_S: Final = 3600.0
_COLUMNS: Final = (
    "point",
    *PAPER_FEATURES,
    "offered_tok_s",
    "throughput_tok_s",
    "is_starved",
)
_TOKENS: Final = "prompt and answer tokens per second"
_UNITS: Final = {
    **{name: FEATURE_UNITS[name] for name in PAPER_FEATURES},
    "offered_tok_s": _TOKENS,
    "throughput_tok_s": _TOKENS,
}
_FLOOD_S: Final = 600.0
_FLOOD_TIMES_BASE: Final = 1.3
"""Requests of a flood, as a multiple of the most that a GPU serves of the base model."""
_LEAST_RPS: Final = 1e-3
_PREPARED_PER_CORE: Final = 2
_LONGEST_DRAWN: Final = 4096
"""Tokens of a request above which none is drawn; a GPU must have memory for it."""
_ADVICE: Final = "delete it, or name another file, to begin a new one"


class DatasetError(PlanError):
    """A dataset cannot be used; the message names the file, and says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """The engine, and the requests, that a dataset is of. `profile_name`: for people, as it was given.
    `lengths`: mean tokens. `lengths_of`: whether all requests have the mean, as in the digital-twin paper."""

    profile: SlotProfile
    profile_name: str
    lengths: Lengths
    lengths_of: LengthsOf = LengthsOf.DRAWN
    duration_s: float = DURATION_S
    seed: int = 0

    @property
    def trained_on(self) -> TrainedOn:
        return TrainedOn(
            profile=self.profile_name,
            profile_sha256=fingerprint(self.profile),
            model=self.profile.model,
            hardware=self.profile.hardware,
            lengths=self.lengths_of.value,
            prompt_tokens=self.lengths.prompt,
            output_tokens=self.lengths.output,
            duration_s=self.duration_s,
        )

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request."""
        if self.lengths_of is LengthsOf.DRAWN:
            return _LONGEST_DRAWN
        return max(round(self.lengths.prompt), 1) + max(round(self.lengths.output), 1)

    def flood_rps(self) -> float:
        """Return requests per second that are more than any GPU serves."""
        demand = Demand(adapters=(), prompt_tokens=self.lengths.prompt, output_tokens=self.lengths.output)
        return _FLOOD_TIMES_BASE * most_of_base_model(self.profile, demand) / demand.request_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Rows of a file. `features`: row by row. `offered_tok_s`, `throughput_tok_s`, `is_starved`: by
    row."""

    trained_on: TrainedOn
    features: Floats
    offered_tok_s: Floats
    throughput_tok_s: Floats
    is_starved: Flags

    def __len__(self) -> int:
        return len(self.throughput_tok_s)

    def subset(self, rows: Any) -> Dataset:
        return Dataset(
            trained_on=self.trained_on,
            features=self.features[rows],
            offered_tok_s=self.offered_tok_s[rows],
            throughput_tok_s=self.throughput_tok_s[rows],
            is_starved=self.is_starved[rows],
        )


def make_dataset(
    path: Path,
    simulated: Simulated,
    *,
    num_rows: int | None = None,
    points: Sequence[GridPoint] | None = None,
    progress: Report | None = None,
) -> int:
    """Simulate until the file has `num_rows`, or all of the grid if None, on all cores; return how many rows
    it has then. Continues a file of the same engine, lengths and seed. `points`: None for the paper's grid,
    and the same with rates near what a GPU serves.

    Points whose slots leave no memory for a request are left out.
    """
    points = [*whole_grid(), *scaled_grid()] if points is None else points
    try:
        with path.open("a+b") as file:
            return _continue(path, file, simulated, points, num_rows, progress)
    except OSError as error:
        raise StorageError(
            f"{path}: the dataset cannot be written ({error.strerror}); rows that are there stay, give the "
            "same command again to continue"
        ) from error


def read_dataset(path: Path) -> Dataset:
    """Read the complete rows of a file, which may be unfinished."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise DatasetError(f"{path}: the dataset cannot be read ({error.strerror})") from error
    header = _header(path, lines)
    rows = _rows(path, lines)
    if len(rows) == 0:
        raise DatasetError(f"{path}: it has no rows yet; give the command that makes it again")
    try:
        trained_on = TrainedOn.of_json(header["trained_on"])
    except (KeyError, ValueError) as error:
        raise DatasetError(f"{path}: {error}; {_ADVICE}") from error
    return Dataset(
        trained_on=trained_on,
        features=with_ratios(rows[:, 1:-3]).astype(np.float64),
        offered_tok_s=rows[:, -3],
        throughput_tok_s=rows[:, -2],
        is_starved=rows[:, -1] != 0,
    )


def _continue(
    path: Path,
    file: BinaryIO,
    simulated: Simulated,
    points: Sequence[GridPoint],
    num_rows: int | None,
    progress: Report | None,
) -> int:
    _lock(path, file)
    header = _header_of(simulated, points)
    num_done, last = _resume(path, file, header)
    order = np.random.default_rng(simulated.seed).permutation(len(points)).tolist()
    place_of = {point: place for place, point in enumerate(order, start=1)}
    left = order if last is None else order[place_of[last] :]
    most = len(points) if num_rows is None else num_rows
    rows = _simulate_all(simulated, _fitting(simulated, points, left), max(most - num_done, 0))
    for row in rows:
        file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        file.flush()  # to the operating system, which keeps it if this process is killed
        num_done += 1
        if progress is not None:
            # By rows if these are counted, otherwise by place in the grid: some points have no row.
            share = num_done / most if num_rows else place_of[int(row[0])] / len(points)
            progress("simulating", min(share, 1.0))
    return num_done


def _lock(path: Path, file: BinaryIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DatasetError(
            f"{path}: another process is making this dataset; wait for it, or name another file"
        ) from None


def _header_of(simulated: Simulated, points: Sequence[GridPoint]) -> dict[str, Any]:
    return {
        "version": VERSION,
        "kind": KIND,
        "loraplex": _release(),
        "trained_on": simulated.trained_on.as_json(),
        "seed": simulated.seed,
        "grid": hashlib.sha256(repr(points).encode()).hexdigest(),
        "units": _UNITS,
        "columns": list(_COLUMNS),
    }


def _release() -> str:
    """Return the release of this package; the commits of a clone after it resume each other's datasets."""
    return re.split(r"\.(?:post|dev)|\+", version("loraplex"), maxsplit=1)[0]


def _resume(path: Path, file: BinaryIO, header: dict[str, Any]) -> tuple[int, int | None]:
    """Remove an incomplete last line, or begin the file. Return its rows, and the point of the last one."""
    file.seek(0)
    content = file.read()
    lines = content.split(b"\n")[:-1]
    begun = json.dumps(header).encode() + b"\n"
    if not lines and begun.startswith(content):
        file.truncate(0)
        file.write(begun)
        file.flush()
        return 0, None
    found = _header(path, lines)
    if found.get("trained_on") != header["trained_on"]:
        known = found.get("trained_on")
        before = known if isinstance(known, dict) else {}
        now = header["trained_on"]
        changed = [
            f"{key} {before.get(key)!r}, now {now[key]!r}" for key in now if before.get(key) != now[key]
        ]
        raise DatasetError(f"{path}: it was begun with {'; '.join(changed)}; {_ADVICE}")
    if different := [key for key in header if found.get(key) != header[key]]:
        raise DatasetError(f"{path}: it was begun with another {' and '.join(different)}; {_ADVICE}")
    rows = _rows(path, lines)
    file.truncate(content.rfind(b"\n") + 1)  # not before it is known to be a dataset
    return len(rows), int(rows[-1, 0]) if len(rows) else None


def _header(path: Path, lines: Sequence[bytes]) -> dict[str, Any]:
    try:
        header = json.loads(lines[0]) if lines else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise DatasetError(f"{path}: it is no dataset; {_ADVICE}")
    if header.get("version") != VERSION or header.get("columns") != list(_COLUMNS):
        raise DatasetError(f"{path}: its format is that of another loraplex; {_ADVICE}")
    return header


def _rows(path: Path, lines: Sequence[bytes]) -> Floats:
    rows: list[list[float]] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, list) or len(row) != len(_COLUMNS) or not all(map(_is_number, row)):
            raise DatasetError(f"{path}: line {number} is not a row of {len(_COLUMNS)} numbers; {_ADVICE}")
        rows.append(row)
    return np.array(rows, np.float64).reshape(-1, len(_COLUMNS))


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class _Task:
    """`share`: of the point. `rng`: the requests are drawn with it, after the adapters."""

    point: int
    share: float | None
    drawn: Drawn
    limits: Limits
    rng: np.random.Generator


def _fitting(simulated: Simulated, points: Sequence[GridPoint], left: Iterable[int]) -> Iterator[_Task]:
    """Yield the points whose slots leave memory for requests, each drawn from its own seed."""
    for number in left:
        rng = np.random.default_rng((simulated.seed, number))
        drawn = draw(points[number], rng)
        limits = run_limits(
            simulated.profile,
            num_slots=drawn.num_slots,
            max_rank=drawn.max_rank,
            longest=simulated.longest,
            duration_s=simulated.duration_s,
        )
        if limits is not None:
            yield _Task(number, points[number].share, drawn, limits, rng)


def _simulate_all(simulated: Simulated, tasks: Iterator[_Task], most: int) -> Iterator[list[float]]:
    """Yield a row for each of the first `most` tasks, in their order: a file that was interrupted equals one
    that was not."""
    num_cores = len(os.sched_getaffinity(0))
    running: deque[Future[list[float]]] = deque()
    flood_rps = simulated.flood_rps()
    pool = ThreadPoolExecutor(num_cores)  # threads: compiled code runs without the interpreter's lock
    try:
        for task in itertools.islice(tasks, most):
            running.append(pool.submit(_simulate, simulated, task, flood_rps))
            if len(running) >= num_cores * _PREPARED_PER_CORE:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _simulate(simulated: Simulated, task: _Task, flood_rps: float) -> list[float]:
    """Return the row of a point."""
    rates_rps = task.drawn.rates_rps
    if task.share is not None:
        shares = rates_rps / rates_rps.sum()
        _, flooded = _run(simulated, task, flood_rps * shares, _FLOOD_S)
        rates_rps = max(task.share * flooded.total_tok_s / sum(simulated.lengths), _LEAST_RPS) * shares
    offered_tok_s, found = _run(simulated, task, rates_rps, simulated.duration_s)
    features = features_of(rates_rps, task.drawn.ranks, task.drawn.num_slots)[:NUM_PAPER_FEATURES]
    return [task.point, *features.tolist(), offered_tok_s, found.total_tok_s, int(found.is_starved)]


def _run(simulated: Simulated, task: _Task, rates_rps: Floats, duration_s: float) -> tuple[float, Predicted]:
    """Simulate adapters with these rates. Return the tokens per second that are offered, and the figures."""
    rng, ranks = task.rng, task.drawn.ranks
    requests = draw_requests(
        rng,
        rates_rps,
        simulated.lengths,
        num_requests=max(int(rng.poisson(rates_rps.sum() * duration_s)), 1),
        duration_s=duration_s,
        mean_lengths=simulated.lengths_of is LengthsOf.MEAN,
    )
    mix = AdapterMix(ranks=ranks, order=rng.permutation(len(ranks)))
    offered_tok_s = int((requests.prompt_tokens + requests.output_tokens).sum()) / duration_s
    limits = task.limits._replace(until_s=duration_s)
    return offered_tok_s, predict_requests(
        simulated.profile, limits, requests, mix, offered_tok_s=offered_tok_s
    )
