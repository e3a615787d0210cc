"""Seconds of a step: more work never takes less, and a known device is found again from its samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_models import noisy
from hypothesis import assume, given
from hypothesis import strategies as st

from loraplex.perf.step_cost import RowCurve, StepCost, StepFeatures, StepTerms, fit_step_cost
from loraplex.scheduling.plan import Chunk, StepPlan
from loraplex.scheduling.step_features import step_features

ADAPTER = 100e6
"""Bytes of an adapter of rank 64 on q, k and v."""
REAL = StepCost(
    decodes=RowCurve(rows=(1, 16, 32, 64, 128), seconds_at=(4.2e-3, 4.8e-3, 5.4e-3, 6.5e-3, 7.4e-3)),
    prompts=RowCurve(
        rows=(16, 64, 128, 160, 512, 2048), seconds_at=(5.2e-3, 6.9e-3, 7.8e-3, 8.2e-3, 18.4e-3, 65e-3)
    ),
    terms=StepTerms(
        prompt_s=30e-6,
        alone_s=0.7e-3,
        beside_prompts_s=3e-6,
        decode_position_s=3e-8,
        prompt_pair_s=4e-10,
        lora_s=0.15e-3,
        prompt_lora_s=0.2e-3,
        adapter_s=2e-6,
        adapter_byte_s=1 / 4.5e12,
        row_adapter_byte_s=1e-15,
    ),
)


def decodes(rows: int, context: int = 128, adapters: int = 0, rank: int = 64) -> StepFeatures:
    size = ADAPTER * rank / 64
    return StepFeatures(
        num_decodes=rows,
        decode_positions=rows * context,
        num_adapters=adapters,
        adapter_bytes=adapters * size,
        row_adapter_bytes=rows * size if adapters else 0,
    )


def prompts(number: int, tokens: int, adapters: int = 0) -> StepFeatures:
    return StepFeatures(
        num_prompts=number,
        num_prompt_tokens=number * tokens,
        prompt_pairs=number * tokens * tokens / 2,
        num_adapters=adapters,
        adapter_bytes=adapters * ADAPTER,
        row_adapter_bytes=number * tokens * ADAPTER if adapters else 0,
    )


GRID = [
    *(decodes(rows, context) for rows in (1, 16, 32, 64, 128) for context in (32, 1024)),
    *(decodes(32, 128, adapters, rank) for adapters in (1, 8, 32) for rank in (8, 64)),
    *(decodes(64, 128, adapters) for adapters in (1, 64)),
    *(prompts(1, tokens) for tokens in (16, 64, 128, 160, 512, 2048)),
    *(prompts(number, 512 // number) for number in (2, 4)),
    *(prompts(1, tokens, adapters=1) for tokens in (128, 512)),
    decodes(32)._replace(num_prompts=1, num_prompt_tokens=128, prompt_pairs=128 * 64),
]


def test_a_device_is_found_again_from_noisy_samples() -> None:
    noise = noisy(0.02)
    found = fit_step_cost([(step, noise(REAL.seconds(step))) for step in GRID for _ in range(5)])
    assert found.decodes.rows == REAL.decodes.rows
    assert found.prompts.rows == REAL.prompts.rows
    for step in (*GRID, decodes(48, 500, 16, 32), prompts(3, 100), prompts(1, 1024, 1)):
        assert found.seconds(step) == pytest.approx(REAL.seconds(step), rel=0.04)
    assert found.terms.adapter_byte_s == pytest.approx(REAL.terms.adapter_byte_s, rel=0.15)
    assert found.quality is not None
    assert found.quality.r_squared > 0.99
    assert found.quality.worst_error < 0.06


def test_without_noise_the_fit_is_exact() -> None:
    for stepped in (False, True):
        real = replace(
            REAL,
            decodes=replace(REAL.decodes, stepped=stepped),
            prompts=replace(REAL.prompts, stepped=stepped),
        )
        found = fit_step_cost([(step, real.seconds(step)) for step in GRID], stepped=stepped)
        assert found.quality is not None
        assert found.quality.worst_error < 1e-6
        assert found.quality.mean_error <= found.quality.worst_error


AMOUNTS = st.integers(0, 5000)


@given(st.tuples(*[AMOUNTS] * len(StepFeatures._fields)), st.tuples(*[AMOUNTS] * len(StepFeatures._fields)))
def test_more_of_anything_never_takes_less(less: tuple[int, ...], more: tuple[int, ...]) -> None:
    """A fit keeps this to samples that say the opposite: larger steps measured faster. A step that only reads
    prompts has nothing before it that hides the host's part, and is another matter."""
    assume((min(less[0], more[0]) == 0) == (max(less[0], more[0]) == 0))
    samples = [(decodes(8), 2e-3), (decodes(16), 1e-3), (decodes(32), 3e-3), (prompts(1, 64), 2e-3)]
    samples += [(decodes(8, 500), 1e-3), (decodes(8, 128, 8), 1e-3), (prompts(1, 512), 1e-3)]
    cost = fit_step_cost(samples)
    names = StepFeatures._fields
    low = StepFeatures(**dict(zip(names, map(min, less, more), strict=True)))
    high = StepFeatures(**dict(zip(names, map(max, less, more), strict=True)))
    assert cost.seconds(low) <= cost.seconds(high) * (1 + 1e-12)
    assert REAL.seconds(low) <= REAL.seconds(high) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 2.0), (2, 2.0), (4, 2.0), (6, 2.5), (8, 3.0), (16, 6.0), (80, 30.0)]
)
def test_the_curve_is_flat_before_its_sizes_and_in_proportion_behind_them(rows: int, seconds: float) -> None:
    assert RowCurve(rows=(4, 8), seconds_at=(2.0, 3.0)).seconds(rows) == pytest.approx(seconds)


def test_a_stepped_curve_costs_what_the_next_size_costs() -> None:
    curve = RowCurve(rows=(4, 8), seconds_at=(2.0, 3.0), stepped=True)
    assert [curve.seconds(rows) for rows in (1, 4, 5, 8, 16)] == [2.0, 2.0, 3.0, 3.0, 6.0]


def test_a_prompt_never_seems_to_make_a_step_shorter() -> None:
    """The curve of decodes, measured apart, may lie above that of prompts."""
    cost = replace(REAL, prompts=RowCurve(rows=(1,), seconds_at=(1e-6,)))
    assert cost.seconds(decodes(64)._replace(num_prompts=1, num_prompt_tokens=2)) >= cost.seconds(decodes(64))


def test_an_empty_step_takes_no_time() -> None:
    assert REAL.seconds(StepFeatures()) == 0


def test_the_features_of_a_plan() -> None:
    def chunk(request_id: str, adapter: str | None, start: int, num_tokens: int) -> Chunk:
        return Chunk(
            request_id=request_id,
            adapter=adapter,
            start=start,
            token_ids=[7] * num_tokens,
            block_ids=[],
            samples=True,
        )

    plan = StepPlan(
        chunks=(chunk("a", "x", 9, 1), chunk("b", "x", 19, 0), chunk("c", "y", 10, 4), chunk("d", None, 0, 6))
    )
    assert step_features(plan.chunks, {"x": 100, "y": 1000, "idle": 7}.__getitem__) == StepFeatures(
        num_decodes=2,  # one of them with a token that is still being sampled
        num_prompts=2,
        num_prompt_tokens=10,
        decode_positions=30,
        prompt_pairs=4 * 12 + 6 * 3,
        num_adapters=2,
        adapter_bytes=1100,
        row_adapter_bytes=2 * 100 + 4 * 1000,
        largest_adapter_bytes=1000,
        num_adapter_rows=6,
    )
