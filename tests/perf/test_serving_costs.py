"""Performance models of other engines, and the file that holds all of them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from loraplex.perf.profile_json import ProfileError
from loraplex.perf.serving_costs import (
    AdapterLoadCost,
    BatchDecode,
    Prefill,
    SlotMemory,
)
from loraplex.perf.slot_profile import (
    PARTS,
    ClientLimits,
    SlotCosts,
    SlotProfile,
    read_slot_profile,
    slot_profile_to_json,
    write_slot_profile,
)

PROFILE = SlotProfile(
    model="some-7b",
    hardware="one GPU",
    costs=SlotCosts(
        decode=BatchDecode(
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
        prefill=Prefill(base_s=3e-3, token_s=50e-6, adapter_s=100e-6, token_rank_s=1e-6, slot_s=10e-6),
        load=AdapterLoadCost(slot_s=2e-3, slot_rank_s=1e-5, disk_s=0.3, disk_rank_s=1e-3),
    ),
    memory=SlotMemory(tokens=300_000, slot_tokens=50, slot_rank_tokens=44),
    client=ClientLimits(latency_s=0.02, max_open=20_000),
    quality={"itl_s_held_out_smape": 5.0},
)


@pytest.mark.parametrize("part", [*PARTS.values(), SlotMemory], ids=lambda part: part.__name__)
def test_every_coefficient_has_a_unit(part: Any) -> None:
    assert set(part.UNITS) == {field.name for field in fields(part)}


def test_loads_take_longer_from_disk_and_by_rank() -> None:
    load = PROFILE.costs.load
    assert load.predict(rank=64, from_disk=False) == pytest.approx(2e-3 + 64e-5)
    assert load.predict(rank=64, from_disk=True) == pytest.approx(2e-3 + 64e-5 + 0.3 + 64e-3)


def test_slots_take_memory_by_the_largest_rank() -> None:
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
