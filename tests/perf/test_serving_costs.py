"""Performance models of other engines: each finds the costs that its samples were made with."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from loraplex.perf.profile_json import ProfileError
from loraplex.perf.serving_costs import (
    AdapterLoadCost,
    BatchDecode,
    BatchFeatures,
    ByteMemory,
    PaddedDecode,
    Prefill,
    RankDecode,
    SchedulerCost,
    SlotMemory,
    fit_quality,
    held_out_error,
)
from loraplex.perf.slot_profile import (
    ClientLimits,
    SlotCosts,
    SlotProfile,
    read_slot_profile,
    slot_profile_to_json,
    write_slot_profile,
)

MODELS = [
    PaddedDecode(rank_s=2e-6, base_s=5e-3),
    RankDecode(rank_s=3e-6, base_s=5e-3),
    BatchDecode(
        base_s=10e-3,
        request_s=50e-6,
        adapter_s=300e-6,
        adapter_rank_s=4e-6,
        kv_token_s=30e-9,
        slot_s=20e-6,
        slot_rank_s=1e-6,
        request_rank_s=1e-6,
        request_adapter_s=1e-6,
        request_slot_s=1e-6,
    ),
    Prefill(base_s=3e-3, token_s=50e-6, adapter_s=100e-6, token_rank_s=1e-6, slot_s=10e-6),
    SchedulerCost(request_s=10e-6, waiting_s=1e-6),
]
PROFILE = SlotProfile(
    model="some-7b",
    hardware="one GPU",
    costs=SlotCosts(
        decode=MODELS[2],  # type: ignore[arg-type]
        prefill=MODELS[3],  # type: ignore[arg-type]
        load=AdapterLoadCost(slot_s=2e-3, slot_rank_s=1e-5, disk_s=0.3, disk_rank_s=1e-3),
    ),
    memory=SlotMemory(tokens=300_000, slot_tokens=50, slot_rank_tokens=44),
    client=ClientLimits(latency_s=0.02, max_open=20_000),
    quality={"itl_s_held_out_smape": 5.0},
)


def samples(count: int = 200) -> list[BatchFeatures]:
    rng = random.Random(0)
    return [
        BatchFeatures(
            num_requests=rng.randint(1, 500),
            num_adapters=rng.randint(1, 200),
            sum_ranks=rng.randint(8, 5000),
            max_rank=rng.choice([8, 16, 32]),
            num_slots=rng.randint(1, 384),
            kv_tokens=rng.randint(10, 300_000),
            num_tokens=rng.randint(1, 8000),
            num_waiting=rng.randint(0, 20_000),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_model_is_found_again_from_noisy_samples(model: BatchDecode) -> None:
    rng = random.Random(1)
    noisy = [(batch, model.predict(batch) * rng.uniform(0.97, 1.03)) for batch in samples()]
    found = type(model).fit(noisy)
    quality = fit_quality(found, noisy)
    assert quality.r_squared > 0.98
    assert held_out_error(type(model).fit, noisy) < 0.03
    assert set(type(model).UNITS) == {name for name in type(model).__dataclass_fields__ if name != "UNITS"}


def test_loads_are_told_by_tier_and_rank() -> None:
    truth = AdapterLoadCost(slot_s=2e-3, slot_rank_s=1e-5, disk_s=0.1, disk_rank_s=1e-3)
    measured = [
        (float(rank), cold, truth.predict(rank=rank, from_disk=cold))
        for rank in (8, 16, 32)
        for cold in (False, True)
    ]
    found = AdapterLoadCost.fit(measured)
    assert found.predict(rank=64, from_disk=True) == pytest.approx(truth.predict(rank=64, from_disk=True))
    assert found.predict(rank=64, from_disk=False) == pytest.approx(truth.predict(rank=64, from_disk=False))


def test_slots_take_memory_by_the_largest_rank_and_adapters_by_their_own() -> None:
    truth = PROFILE.memory
    measured = [
        (slots, rank, float(truth.predict(num_slots=slots, max_rank=rank)))
        for slots in (1, 16, 64, 128)
        for rank in (8, 16, 32)
    ]
    found = SlotMemory.fit(measured)
    assert found.predict(num_slots=96, max_rank=16) == pytest.approx(
        truth.predict(num_slots=96, max_rank=16), rel=1e-3
    )
    assert truth.predict(num_slots=384, max_rank=64) == 0
    memory = ByteMemory(num_bytes=1000, token_bytes=10)
    assert memory.predict([100, 50]) == 85
    assert memory.predict([2000]) == 0


def test_a_profile_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_slot_profile(path, PROFILE, {"date": "today"})
    assert read_slot_profile(path, "some-7b") == PROFILE
    document = json.loads(path.read_text())
    assert document["units"]["prefill"]["token_s"] == "s per prompt token"
    assert SlotCosts.of_coefficients(PROFILE.costs.coefficients) == PROFILE.costs


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("costs", "has no 'costs'"),
        ("memory", "has no 'memory'"),
        ("model", "has no 'model'"),
        ("client", "has no 'client'"),
    ],
)
def test_a_profile_with_a_part_missing_is_refused(tmp_path: Path, part: str, says: str) -> None:
    path = tmp_path / "profile.json"
    document = json.loads(slot_profile_to_json(PROFILE))
    del document[part]
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=says):
        read_slot_profile(path)


def test_a_coefficient_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    document = json.loads(slot_profile_to_json(PROFILE))
    document["costs"]["decode"]["base_s"] = "fast"
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match="decode: base_s is 'fast', not a number"):
        read_slot_profile(path)
