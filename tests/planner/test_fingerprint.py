"""The hash of a profile: it changes with what the profile predicts, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small import own_on_cpu, slot_profile

from loraplex.perf.cost_model import Corrections
from loraplex.planner.fingerprint import fingerprint


def test_words_for_readers_and_the_format_are_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, slots = own_on_cpu(), slot_profile()
    before = fingerprint(ours), fingerprint(slots)
    for module in ("profile_json", "slot_profile"):
        monkeypatch.setattr(f"loraplex.perf.{module}.VERSION", 99)
    monkeypatch.setattr("loraplex.perf.profile_json._UNITS", {"*_s": "s"})
    monkeypatch.setattr("loraplex.perf.serving_costs.SlotMemory.UNITS", "tokens")
    assert (fingerprint(ours), fingerprint(slots)) == before


def test_how_well_a_profile_predicts_is_not_in_it() -> None:
    ours, slots = own_on_cpu(), slot_profile()
    assert ours.held_out is not None
    assert fingerprint(replace(ours, held_out=None)) == fingerprint(ours)
    assert slots.quality
    assert fingerprint(replace(slots, quality={})) == fingerprint(slots)


def test_all_that_predicts_is_in_it() -> None:
    ours, slots = own_on_cpu(), slot_profile()
    profiles = [
        ours,
        replace(ours, corrections=Corrections(step=1.1)),
        replace(ours, read=replace(ours.read, unit_s=2 * ours.read.unit_s)),
        replace(ours, memory=None),
        slots,
        replace(slots, max_running=7),
        replace(slots, costs=slots.costs.of_base_model),
    ]
    assert len({fingerprint(each) for each in profiles}) == len(profiles)
