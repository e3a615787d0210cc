"""The questions a policy asks, with the figures of a known machine; corrections and the default model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from cost_models import MIB, PREFILL_S, RANK_64_LAYERS, SUBJECT, h200_model

from loraplex.core.shape import ModelShape
from loraplex.perf.cost_model import Corrections, CostKind, CostModel, KernelKind, with_padded_kernels
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.step_cost import StepFeatures
from loraplex.perf.subject import Subject, shape_key
from loraplex.scheduling.plan import Chunk
from loraplex.scheduling.step_features import step_features

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


def decode_s(model: CostModel, sizes_mib: Sequence[int | None]) -> float:
    """Return the seconds of a step in which each request decodes, with its own adapter or with none."""
    chunks = [
        Chunk(
            request_id=str(number),
            adapter=None if size is None else f"{number}",
            start=100,
            token_ids=[1],
            block_ids=[],
            samples=True,
        )
        for number, size in enumerate(sizes_mib)
    ]
    return model.step_s(step_features(chunks, lambda version: (sizes_mib[int(version)] or 0) * MIB))


def row_cost_model() -> CostModel:
    """With a cost of every row's LoRA as well."""
    model = h200_model()
    terms = replace(model.step.terms, row_adapter_byte_s=1e-14)
    return replace(model, step=replace(model.step, terms=terms))


def test_padded_kernels_take_as_long_for_a_batch_of_one_rank() -> None:
    model = row_cost_model()
    padded = with_padded_kernels(model)
    assert (model.kernels, padded.kernels) == (KernelKind.RANK, KernelKind.PADDED)
    sizes = [100, 100, None, 100]
    assert decode_s(padded, sizes) == decode_s(model, sizes)
    assert decode_s(padded, [None, None]) == decode_s(model, [None, None])
    assert padded.step_s(PREFILL) == model.step_s(PREFILL)


def test_a_large_rank_makes_small_ones_dearer_with_padded_kernels() -> None:
    model = row_cost_model()
    padded = with_padded_kernels(model)
    small, mixed = [12] * 7, [*[12] * 7, 100]
    assert decode_s(padded, mixed) == pytest.approx(decode_s(padded, [100] * 8))
    large_s = decode_s(model, mixed) - decode_s(model, small)
    assert decode_s(padded, mixed) - decode_s(padded, small) > 5 * large_s


def test_a_slow_bus_makes_workers_worth_while() -> None:
    model = h200_model()
    slow = replace(model, corrections=Corrections(copy=10.0))
    assist_s = model.assist.layer_s(64 * 8192 * 3, num_groups=1, num_tokens=128, num_workers=8)
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
    model = default_cost_model(subject, SHAPE, num_cores=4)
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


def test_a_merge_is_guessed_as_two_passes_over_its_bytes_and_corrected_with_steps() -> None:
    subject = Subject(machine="m", device="cuda", model=shape_key(SHAPE), dtype="bfloat16", num_layers=32)
    model = default_cost_model(subject, SHAPE, num_cores=8)
    assert model.merge_s(0) == 0.0
    more_s = model.merge_s(2_000_000_000) - model.merge_s(1_000_000_000)
    assert more_s == pytest.approx(2e9 * model.step.terms.adapter_byte_s)
    slower = replace(model, corrections=Corrections(step=3.0))
    assert slower.merge_s(MIB) == pytest.approx(3 * model.merge_s(MIB))
    on_cpu = default_cost_model(replace(subject, device="cpu"), SHAPE, num_cores=8)
    assert on_cpu.merge_s(1_000_000_000) > 10.0


def test_a_step_on_merged_weights_costs_as_much_as_the_base_models() -> None:
    model = row_cost_model()
    chunks = [Chunk(str(n), adapter, 100, [1], [], True) for n, adapter in enumerate("aab")]
    base = [chunk._replace(adapter=None) for chunk in chunks]
    merged = step_features(chunks, lambda version: MIB).on_merged_weights()
    assert merged == step_features(base, lambda version: MIB)
    assert model.step_s(merged) < model.step_s(step_features(chunks, lambda version: MIB))
