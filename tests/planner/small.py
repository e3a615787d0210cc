"""Datasets and surrogates that are made within a second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.perf.slot_profile import SlotProfile
from loraplex.planner.dataset import Dataset, Simulated
from loraplex.planner.features import FEATURE_NAMES, with_ratios
from loraplex.planner.grid import GridPoint
from loraplex.planner.surrogate import Surrogate
from loraplex.planner.trees import LEAF, Tree, forest_of
from loraplex.twin.run_workload import Lengths

PROFILE_NAME = "vllm-h100-llama-3.1-8b"
LENGTHS = Lengths(prompt=200.0, output=30.0)
NAMES = FEATURE_NAMES


def slot_profile(name: str = PROFILE_NAME) -> SlotProfile:
    profile = find_profile(Path(name))
    assert isinstance(profile, SlotProfile)
    return profile


def own_on_cpu() -> CostModel:
    """Return the profile of our own engine, as if on a CPU."""
    profile = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(profile, CostModel)
    assert profile.memory is not None
    return replace(
        profile,
        subject=replace(profile.subject, device="cpu"),
        bus=None,
        memory=replace(profile.memory, arena_bytes=None, kv_tokens=200_000),
    )


def simulated(seed: int = 0) -> Simulated:
    return Simulated(
        profile=slot_profile(), profile_name=PROFILE_NAME, lengths=LENGTHS, duration_s=20.0, seed=seed
    )


def points(most_slots: int = 16) -> list[GridPoint]:
    return [
        GridPoint(sizes=(8, 16), rates_rps=(rate, 0.1), num_adapters=16, num_slots=num_slots)
        for rate in (0.1, 0.4, 1.6, 3.2)
        for num_slots in (4, 8, most_slots)
    ]


def random_features(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    """Return features within the range of the grid, in single precision."""
    most = np.array((384, 400, 1.5, 32, 32, 12, 384))
    rows = (rng.random((num_rows, 7)) * most).astype(np.float32)
    rows[:, 6] += 1
    return with_ratios(rows)


def made_up(num_rows: int = 200, seed: int = 0) -> Dataset:
    """Return rows of an engine that serves at most 50,000 tokens per second, and fewer with many slots."""
    features = random_features(np.random.default_rng(seed), num_rows).astype(np.float64)
    offered, capacity = features[:, 1] * sum(LENGTHS), 50_000 - 80 * features[:, 6]
    return Dataset(
        trained_on=simulated().trained_on,
        features=features,
        offered_tok_s=offered,
        throughput_tok_s=np.minimum(offered, capacity),
        is_starved=capacity < 0.9 * offered,
    )


def by_hand() -> Surrogate:
    """Return a surrogate of a GPU that serves 4,600 tokens per second, or fewer with many slots."""
    throughput = Tree(6, 100.0, Tree(LEAF, 4600.0), Tree(LEAF, 3450.0))
    return Surrogate(
        trained_on=simulated().trained_on,
        ranges=np.array([(1, 64), (0.1, 40), (0, 3), (8, 32), (8, 32), (0, 12), (1, 200)], np.float64),
        throughput=forest_of([throughput]),
        starvation=forest_of([Tree(1, 22.0, Tree(LEAF, 0.0), Tree(LEAF, 1.0))]),
    )
