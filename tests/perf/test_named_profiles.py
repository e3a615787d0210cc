"""Profiles by name or by path, and the figures that are shown of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cost_models import SUBJECT, h200_model

from loraplex.perf.cost_model import CostModel, KernelKind
from loraplex.perf.named_profiles import find_profile, model_of, named_profiles, profile_of
from loraplex.perf.profile_figures import BATCHES, CONTEXT, RANK, figures_of
from loraplex.perf.profile_json import ProfileError, write_profile
from loraplex.perf.slot_profile import SlotProfile
from loraplex.perf.step_cost import StepFeatures

OURS = "h200-llama-2-7b"
NAMED = named_profiles()
MIB = 1 << 20


def test_every_profile_has_its_name_and_says_how_well_it_fits() -> None:
    assert OURS in NAMED
    assert all(find_profile(Path(name)) == profile for name, profile in NAMED.items())
    for profile in NAMED.values():
        if isinstance(profile, CostModel):
            assert profile.measured
            assert profile.memory is not None
            assert profile.held_out is not None
        else:
            assert profile.quality["num_held_out"] > 0


def test_each_of_our_own_engine_has_a_padded_twin_and_no_other() -> None:
    ours = {name: each for name, each in NAMED.items() if isinstance(each, CostModel)}
    plain = {name for name in ours if not name.endswith("-padded")}
    assert plain == {OURS, "h200-llama-3-8b"}
    assert ours.keys() == plain | {f"{name}-padded" for name in plain}
    for name in plain:
        padded = ours[f"{name}-padded"]
        assert padded.kernels is KernelKind.PADDED
        assert replace(padded, kernels=KernelKind.RANK) == ours[name]
    assert not any(name.endswith("-padded") for name in NAMED.keys() - ours.keys())


def test_a_machine_like_the_one_of_a_profile_has_its_costs() -> None:
    ours = NAMED[OURS]
    assert isinstance(ours, CostModel)
    assert profile_of(ours.subject) == ours
    assert profile_of(replace(ours.subject, machine="NVIDIA H200, 8 cores of another CPU")) is None


def test_a_file_wins_over_a_name_and_a_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(OURS)
    path.mkdir()
    assert find_profile(path) == NAMED[OURS]
    path.rmdir()
    write_profile(path, h200_model())
    assert find_profile(path) == h200_model()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "h200-lama-2-7b",
            "there is no file or named profile 'h200-lama-2-7b'; did you mean h200-llama-2-7b or",
        ),
        ("/no/where.json", "there is no file or named profile '/no/where.json'; there are h200-llama-2-7b, "),
    ],
)
def test_what_is_neither_a_name_nor_a_file_is_refused_with_names(name: str, says: str) -> None:
    with pytest.raises(ProfileError) as caught:
        find_profile(Path(name))
    assert str(caught.value).startswith(says)
    assert "`loraplex profile list`" in str(caught.value)


def test_a_profile_of_another_model_is_refused_whatever_its_kind() -> None:
    for name, profile in NAMED.items():
        assert find_profile(Path(name), model_of(profile)) == profile
        with pytest.raises(ProfileError, match=f"^{name}: it is of model .*, not 'another'"):
            find_profile(Path(name), "another")


def test_figures_of_our_engine_are_those_of_its_steps_memory_and_loads() -> None:
    model = h200_model()
    assert model.memory is not None
    figures = figures_of(model)
    num_bytes = model.memory.bytes_per_rank(("q_proj", "k_proj", "v_proj")) * RANK
    for number, each in zip(BATCHES, figures.decodes, strict=True):
        base = StepFeatures(num_decodes=number, decode_positions=number * CONTEXT)
        lora = base._replace(
            num_adapters=number, adapter_bytes=number * num_bytes, row_adapter_bytes=number * num_bytes
        )
        assert each.base_s == pytest.approx(model.step_s(base))
        assert each.lora_s == pytest.approx(model.step_s(lora))
        assert (each.mixed_s is None) == (number == 1)
        assert each.mixed_s is None or each.base_s < each.mixed_s < model.step_s(lora)
    assert figures.kv_tokens == (100 << 30) // model.memory.token_bytes
    assert figures.adapter_tokens == -(
        -model.memory.adapter_bytes(RANK, ("q_proj", "k_proj", "v_proj")) // (MIB // 2)
    )
    assert figures.load_s is not None
    assert figures.first_load_s is not None
    assert 0 < figures.load_s < figures.first_load_s


def test_figures_that_a_profile_does_not_tell_are_left_out() -> None:
    model = replace(h200_model(), memory=None)
    figures = figures_of(model)
    assert model.subject == SUBJECT
    assert [each.lora_s for each in figures.decodes] == [None] * len(BATCHES)
    assert (figures.kv_tokens, figures.load_s, figures.prefill_lora_tok_s) == (None, None, None)
    assert figures.prefill_tok_s > 0


def test_a_batch_that_memory_does_not_hold_has_no_time() -> None:
    memory = h200_model().memory
    assert memory is not None
    small = replace(h200_model(), memory=replace(memory, arena_bytes=20 << 30))
    times = [each.lora_s is not None for each in figures_of(small).decodes]
    assert times == [True, True, True, False]


def test_engines_with_slots_pad_and_take_slots_from_their_memory() -> None:
    slots = [each for each in NAMED.values() if isinstance(each, SlotProfile)]
    assert slots
    for profile in slots:
        figures = figures_of(profile)
        assert figures.adapter_tokens is not None
        assert figures.adapter_tokens > 0
        for each in figures.decodes:
            assert each.lora_s is None or each.lora_s > each.base_s
            assert each.mixed_s is None or each.mixed_s == each.lora_s
