"""Datasets for the planner's surrogates, and the recorded runs that they are compared with.

Datasets take minutes to hours of simulation. They are kept in `benchmarks/.cache`, which git ignores, and are
continued there if they are asked for with more rows.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from loraplex.core.errors import UserError
from loraplex.perf.named_profiles import find_profile
from loraplex.perf.slot_profile import SlotProfile
from loraplex.planner.dataset import Dataset, Simulated, make_dataset, read_dataset
from loraplex.planner.features import Features, features_of
from loraplex.twin.outcome import STARVED_BELOW
from loraplex.twin.recorded_runs import Measured, RunSetup, read_runs
from loraplex.twin.run_workload import Lengths

CACHE: Final = Path(__file__).parent / ".cache"
HELD_OUT: Final = "agullo_digital_twin_vs_real.csv.gz"
ALL_RUNS: Final = "agullo_vllm_adapter_runs.csv.gz"
HOUR_S: Final = 3600.0
NUM_ROWS: Final = 1500
"""Rows that surrogates are trained on, unless others are asked for."""
_CHATS: Final = "ShareGPT"


class Model(NamedTuple):
    """A recorded model. `lengths`: mean tokens of the requests that all its runs were sent."""

    name: str
    recorded: str
    profile: str
    lengths: Lengths


MODELS: Final = (
    Model("llama", "llama-3.1-8b-instruct", "vllm-h100-llama-3.1-8b", Lengths(223.0, 194.2)),
    Model("qwen", "qwen-2.5-7b-instruct", "vllm-h100-qwen-2.5-7b", Lengths(223.3, 190.5)),
)


class Asked(NamedTuple):
    """The options of the command. `data`: the folder with the recorded runs; `num_rows`: simulated runs
    to train surrogates on; `num_workers`: processes that simulate plans."""

    data: Path
    num_rows: int
    num_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A recorded run. `is_feasible`: it served 0.9 of what it was sent."""

    setup: RunSetup
    measured: Measured
    offered_tok_s: float
    is_feasible: bool


def profile_of(model: Model) -> SlotProfile:
    found = find_profile(Path(model.profile))
    assert isinstance(found, SlotProfile)
    return found


def dataset_of(model: Model, num_rows: int) -> Dataset:
    """Return the first rows of the model's dataset, which are simulated if they are not in the cache."""
    CACHE.mkdir(exist_ok=True)
    path = CACHE / f"{model.name}.jsonl"
    simulated = Simulated(profile=profile_of(model), profile_name=model.profile, lengths=model.lengths)
    if path.is_file():
        found = read_dataset(path)  # Another process may be making more rows.
        if found.trained_on == simulated.trained_on and len(found) >= num_rows:
            return found.subset(slice(num_rows))

    def say(phase: str, done: float | None) -> None:
        print(f"{model.name}: {phase}, {done or 0:.1%}", file=sys.stderr, flush=True)

    make_dataset(path, simulated, num_rows=num_rows, progress=say)
    return read_dataset(path).subset(slice(num_rows))


def recorded_runs(path: Path, model: Model) -> list[Recorded]:
    """Return the runs of an hour of chats that were completed."""
    if not path.is_file():
        raise UserError(
            f"{path} is not there: the sections `surrogates` and `recorded` need the recorded runs of the "
            "authors of the digital twin; give their folder by --data"
        )
    runs = read_runs(path)
    found = []
    for setup in runs.setups:
        is_chat = setup.dataset is None or setup.dataset.startswith(_CHATS)
        if setup.model != model.recorded or setup.duration_s != HOUR_S or not is_chat:
            continue
        measured = runs.measured.get(setup.key)
        if measured is None:
            continue
        offered_tok_s = setup.offered_rps * sum(model.lengths)
        found.append(
            Recorded(
                setup=setup,
                measured=measured,
                offered_tok_s=offered_tok_s,
                is_feasible=measured.total_tok_s >= STARVED_BELOW * offered_tok_s,
            )
        )
    return found


def features_of_run(setup: RunSetup) -> Features:
    """Return a run's features. Which adapter has which rank is not recorded: each rank has as many."""
    rates = np.repeat([rate for rate, _ in setup.rates], [count for _, count in setup.rates])
    ranks = np.resize(np.array(setup.ranks, np.float64), len(rates))
    ranks[0] = setup.max_rank
    return features_of(rates, ranks, setup.num_slots)
