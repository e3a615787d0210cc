"""The questions a policy asks, with the figures of a known machine; corrections and the default model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_models import MIB, PREFILL_S, RANK_64_LAYERS, SUBJECT, h200_model

from loraplex.core.shape import ModelShape
from loraplex.perf.cost_model import Corrections, CostKind
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.step_cost import StepFeatures
from loraplex.perf.subject import Subject, shape_key

SHAPE = ModelShape(
    family="llama",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    vocab_size=32000,
    max_position=4096,
)
PREFILL = StepFeatures(num_prompt_tokens=128, prompt_pairs=128 * 64)


def test_costs_are_multiplied_with_their_own_correction() -> None:
    model = h200_model()
    slower = replace(model, corrections=Corrections(copy=2.0, step=5.0))
    assert slower.copy_s(MIB) == 2 * model.copy_s(MIB) > 0
    assert slower.step_s(PREFILL) == 5 * model.step_s(PREFILL) > 0
    assert [slower.corrections.of(kind) for kind in CostKind] == [2.0, 5.0]
    assert slower.arrivals_s([MIB], [1])[0] == pytest.approx(2 * model.arrivals_s([MIB], [1])[0])


def test_a_slow_bus_makes_workers_worth_while() -> None:
    model = h200_model()
    slow = replace(model, corrections=Corrections(copy=10.0))
    assist_s = model.assist_layer_s(num_tokens=128, weights_of_groups=[64 * 8192 * 3], num_cores=8)
    step_s = model.step_s(PREFILL)
    assert step_s == pytest.approx(PREFILL_S, rel=0.05)
    assert slow.assist_layers(RANK_64_LAYERS, step_s, assist_s).num_layers > 0
    assert model.assist_layers(RANK_64_LAYERS, step_s, assist_s).num_layers == 0
    groups = model.plan_groups(RANK_64_LAYERS, step_s)
    assert model.stall_s(model.arrivals_s(RANK_64_LAYERS, groups), step_s) < 0.2e-3


def test_without_a_bus_layers_are_there_at_once() -> None:
    model = replace(h200_model(), bus=None)
    assert model.copy_s(MIB) == 0
    assert model.plan_groups([MIB, MIB], 1e-3) == (2,)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_default_model_is_marked_and_more_cautious_than_a_measured_one(device: str) -> None:
    subject = replace(SUBJECT, device=device)
    model = default_cost_model(subject, SHAPE, element_bytes=2, num_cores=4)
    assert not model.measured
    assert model.held_out is None
    assert model.memory is None
    assert (model.bus is None) == (device == "cpu")
    measured = h200_model()
    adapters = StepFeatures(num_decodes=32, decode_positions=4096, num_adapters=32, adapter_bytes=3.2e9)
    for step in (PREFILL, adapters, StepFeatures(num_decodes=1, decode_positions=1)):
        assert model.step_s(step) > measured.step_s(step)
    assert model.read_s(MIB) > measured.read_s(MIB)
    assert model.disk.seconds(MIB) > measured.disk.seconds(MIB)


def test_subjects_of_other_models_have_other_files() -> None:
    keys = {
        shape_key(SHAPE),
        shape_key(replace(SHAPE, num_kv_heads=8)),
        shape_key(replace(SHAPE, num_layers=2)),
    }
    assert len(keys) == 3
    name = replace(SUBJECT, machine="Intel(R) Xeon(R) / 2 cores", model=shape_key(SHAPE)).file_name
    assert name == (
        "intel-r-xeon-r-2-cores--cuda--llama-32x4096-mlp11008-heads32.32x128-vocab32000--bfloat16.json"
    )
    other = Subject(machine="m", device="cuda", model="llama-32x4096", dtype="float16", num_layers=32)
    assert [text.split()[0] for text in SUBJECT.differences(other)] == ["machine", "dtype"]
    assert SUBJECT.differences(SUBJECT) == []
