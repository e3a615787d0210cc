"""Costs of sets of requests: the papers' forms as in their figures, the others as the twins' own models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cost_models import H200_MEMORY, h200_model
from hypothesis import given
from hypothesis import strategies as st

from loraplex.core.modules import GROUPS
from loraplex.perf.cost_model import Corrections, CostModel, KernelKind
from loraplex.perf.serving_costs import AdapterLoadCost, BatchDecode, BatchFeatures, Prefill
from loraplex.perf.set_costs import (
    PaddedSetCosts,
    RankSetCosts,
    RequestSets,
    SetCosts,
    SetSamples,
    SlotSetCosts,
    StepSetCosts,
    linear_costs,
)
from loraplex.perf.slot_profile import SlotCosts
from loraplex.perf.step_cost import RowCurve, StepCost, StepFeatures, StepTerms

Request = tuple[int, int, int]
"""Rank, prompt tokens, KV tokens."""
COEFFICIENTS = {
    "decode_rank_s": 2e-6,
    "decode_base_s": 30e-3,
    "prefill_token_s": 50e-6,
    "prefill_token_rank_s": 40e-9,
    "prefill_base_s": 5e-3,
}


def sets_of(*sets: Sequence[Request], distinct: bool = True, dtype: type = np.int64) -> RequestSets:
    """One row for each of these sets. `distinct`: every request has an adapter of its own, otherwise those of
    one rank share one."""

    def row(requests: Sequence[Request]) -> list[int]:
        ranks = [rank for rank, _, _ in requests]
        adapters = [rank for rank in ranks if rank > 0]
        return [
            len(requests),
            sum(ranks),
            max(ranks, default=0),
            sum(prompt for _, prompt, _ in requests),
            sum(kv for _, _, kv in requests),
            len(adapters) if distinct else len(set(adapters)),
        ]

    return RequestSets(*np.array([row(each) for each in sets], dtype).T)


def of_rank(rank: int, number: int = 1, prompt: int = 100) -> list[Request]:
    return [(rank, prompt, prompt + 50)] * number


# ---- the linear forms

SERVERS = (of_rank(32, 24), of_rank(64, 16))
"""CaraServe's toy example: what two servers have when a request of rank 64 arrives."""
WITH_NEW = tuple([*server, *of_rank(64)] for server in SERVERS)


@pytest.mark.parametrize(
    ("form", "measured_ms", "rank_ms", "base_ms", "expected_ms"),
    [
        (PaddedSetCosts, (34.8, 35.8), 1 / 256, 31.8, (38.05, 36.05)),
        (RankSetCosts, (35.3, 35.9), 0.6 / 256, 33.5, (35.45, 36.05)),
    ],
)
def test_the_toy_example_of_caraserve(
    form: type[PaddedSetCosts | RankSetCosts],
    measured_ms: tuple[float, float],
    rank_ms: float,
    base_ms: float,
    expected_ms: tuple[float, float],
) -> None:
    """Two latencies for each kind of kernels, which determine the model; then the request of rank 64 on
    either server."""
    samples = SetSamples(sets_of(*SERVERS), np.array(measured_ms) / 1e3)
    costs = form.fit(samples, samples)
    assert costs.decode_rank_s * 1e3 == pytest.approx(rank_ms, rel=1e-6)
    assert costs.decode_base_s * 1e3 == pytest.approx(base_ms, rel=1e-6)
    assert costs.decode_s(sets_of(*WITH_NEW)) * 1e3 == pytest.approx(expected_ms, abs=1e-6)


@pytest.mark.parametrize("form", [PaddedSetCosts, RankSetCosts])
def test_a_linear_form_is_found_again_from_noisy_samples(form: type[PaddedSetCosts | RankSetCosts]) -> None:
    rng = np.random.default_rng(0)
    batches = [
        [(int(rank), int(rng.integers(10, 2000)), 100) for rank in rng.choice([8, 16, 32, 64, 128], size)]
        for size in (4, 8, 16, 32, 64)
        for _ in range(20)
    ]
    sets, real = sets_of(*batches), form(**COEFFICIENTS)

    def noisy(seconds: Any) -> Any:
        return seconds * rng.uniform(0.98, 1.02, len(seconds))

    decodes, prefills = (
        SetSamples(sets, noisy(seconds)) for seconds in (real.decode_s(sets), real.prefill_s(sets))
    )
    found = form.fit(decodes, prefills)
    for name, value in COEFFICIENTS.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.25), name
    assert found.decode_rank_s == pytest.approx(real.decode_rank_s, rel=0.05)
    for quality in (found.decode_quality, found.prefill_quality):
        assert quality is not None
        assert quality.num_samples == 100
        assert quality.r_squared > 0.96
        assert quality.mean_error < 0.015


@pytest.mark.parametrize(("form", "padded"), [(PaddedSetCosts, True), (RankSetCosts, False)])
def test_lines_are_fitted_to_other_costs(form: type[PaddedSetCosts | RankSetCosts], padded: bool) -> None:
    again = linear_costs(form(**COEFFICIENTS), padded=padded)
    assert type(again) is form
    for name, value in COEFFICIENTS.items():
        assert getattr(again, name) == pytest.approx(value), name
    model = h200_model() if not padded else replace(h200_model(), kernels=KernelKind.PADDED)
    found = linear_costs(StepSetCosts(model, rank_bytes=1e6), padded=padded)
    assert found.decode_rank_s > 0
    assert found.decode_quality is not None
    assert found.decode_quality.num_samples == 40
    assert found.decode_quality.worst_error < 0.3


def test_what_each_request_takes_is_found_if_it_is_looked_for() -> None:
    sets = sets_of(*(of_rank(rank, size) for rank in (8, 64, 128) for size in (4, 16, 64)))
    real = RankSetCosts(**COEFFICIENTS, decode_request_s=1e-3)
    decodes, prefills = SetSamples(sets, real.decode_s(sets)), SetSamples(sets, real.prefill_s(sets))
    found = RankSetCosts.fit(decodes, prefills, by_request=True)
    without = RankSetCosts.fit(decodes, prefills)
    assert found.decode_request_s == pytest.approx(1e-3)
    assert found.decode_rank_s == pytest.approx(real.decode_rank_s)
    assert without.decode_request_s == 0.0
    assert found.decode_quality is not None
    assert without.decode_quality is not None
    assert found.decode_quality.r_squared > without.decode_quality.r_squared


def test_only_padded_kernels_mind_the_largest_rank() -> None:
    sets = sets_of([*of_rank(8, 7), *of_rank(64)], of_rank(64, 8), of_rank(15, 8))
    padded, ours = PaddedSetCosts(**COEFFICIENTS), RankSetCosts(**COEFFICIENTS)
    for seconds in (padded.decode_s(sets), padded.prefill_s(sets)):
        assert seconds[0] == seconds[1] > seconds[2]
    for seconds in (ours.decode_s(sets), ours.prefill_s(sets)):
        assert seconds[0] == pytest.approx(seconds[2])
        assert seconds[0] < seconds[1]


# ---- ours

SECONDS = st.floats(1e-6, 1e-2)
TERM_S = st.just(0.0) | st.floats(1e-12, 1e-4)


@st.composite
def curves(draw: st.DrawFn) -> RowCurve:
    rows = sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=5)))
    seconds_at = sorted(draw(st.lists(SECONDS, min_size=len(rows), max_size=len(rows))))
    return RowCurve(rows=tuple(rows), seconds_at=tuple(seconds_at), stepped=draw(st.booleans()))


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    terms = StepTerms(**{name: draw(TERM_S) for name in StepTerms.__dataclass_fields__})
    return replace(
        h200_model(),
        step=StepCost(decodes=draw(curves()), prompts=draw(curves()), terms=terms),
        corrections=Corrections(step=draw(st.floats(0.5, 2.0))),
        kernels=draw(st.sampled_from(KernelKind)),
    )


REQUESTS = st.tuples(
    st.sampled_from([0, 8, 16, 64, 128]), st.integers(1, 400) | st.integers(1, 9000), st.integers(1, 9000)
)
SETS = st.lists(st.lists(REQUESTS, max_size=40), min_size=1, max_size=6)


@given(models(), SETS, st.booleans(), st.sampled_from([np.int64, np.float64]))
def test_sets_cost_what_the_step_model_says(
    model: CostModel, requests: list[list[Request]], distinct: bool, dtype: type
) -> None:
    """Row by row, of the step that `StepSetCosts` says it stands for."""
    rank_bytes, positions = 1e6, 77.0
    sets = sets_of(*requests, distinct=distinct, dtype=dtype)
    costs = StepSetCosts(model, rank_bytes=rank_bytes, prompt_positions=positions)
    decodes, prefills = [], []
    for row in zip(*sets, strict=True):
        number, sum_ranks, max_rank, tokens, kv_tokens, num_adapters = (int(value) for value in row)
        lora = StepFeatures(
            num_adapters=num_adapters,
            adapter_bytes=rank_bytes * min(sum_ranks, num_adapters * max_rank),
            largest_adapter_bytes=rank_bytes * max_rank,
        )
        decodes.append(
            lora._replace(
                num_decodes=number,
                decode_positions=kv_tokens,
                row_adapter_bytes=rank_bytes * sum_ranks,
                num_adapter_rows=number,
            )
        )
        prefills.append(
            lora._replace(
                num_prompts=number,
                num_prompt_tokens=tokens,
                prompt_pairs=tokens * positions,
                row_adapter_bytes=rank_bytes * tokens * sum_ranks / max(number, 1),
                num_adapter_rows=tokens,
            )
        )
    np.testing.assert_allclose(costs.decode_s(sets), [*map(model.step_s, decodes)], rtol=1e-12, atol=0)
    np.testing.assert_allclose(costs.prefill_s(sets), [*map(model.step_s, prefills)], rtol=1e-12, atol=0)


@given(models(), st.lists(REQUESTS, max_size=40), REQUESTS, st.booleans())
def test_a_request_more_never_makes_a_decode_step_shorter(
    model: CostModel, requests: list[Request], new: Request, distinct: bool
) -> None:
    sets = sets_of(requests, [*requests, new], distinct=distinct)
    before_s, after_s = StepSetCosts(model, rank_bytes=1e6).decode_s(sets)
    assert before_s <= after_s * (1 + 1e-12)


def test_the_bytes_of_a_rank_are_those_of_the_profile() -> None:
    memory, modules = H200_MEMORY, GROUPS["qkv"]
    for rank in (8, 64):
        num_bytes = memory.adapter_bytes(rank, modules) - memory.table_bytes
        assert rank * memory.bytes_per_rank(modules) == num_bytes


# ---- engines with slots

SLOTS = SlotCosts(
    decode=BatchDecode(
        base_s=10e-3,
        request_s=100e-6,
        adapter_s=300e-6,
        adapter_rank_s=5e-6,
        kv_token_s=1e-6,
        slot_s=20e-6,
        slot_rank_s=1e-6,
        request_rank_s=2e-6,
        request_adapter_s=3e-6,
        request_slot_s=4e-6,
    ),
    prefill=Prefill(base_s=5e-3, token_s=50e-6, adapter_s=400e-6, token_rank_s=1e-6, slot_s=30e-6),
    load=AdapterLoadCost(slot_s=2e-3),
)


@given(SETS, st.booleans(), st.integers(1, 300), st.sampled_from([8, 128]))
def test_sets_cost_what_the_model_of_slots_says(
    requests: list[list[Request]], distinct: bool, num_slots: int, max_rank: int
) -> None:
    sets = sets_of(*requests, distinct=distinct)
    batches = [
        BatchFeatures(
            num_requests=int(number),
            num_adapters=int(num_adapters),
            max_rank=max_rank,
            num_slots=num_slots,
            kv_tokens=int(kv_tokens),
            num_tokens=int(tokens),
        )
        for number, _, _, tokens, kv_tokens, num_adapters in zip(*sets, strict=True)
    ]
    costs = SlotSetCosts(SLOTS, num_slots=num_slots, max_rank=max_rank)
    for found, part in ((costs.decode_s(sets), SLOTS.decode), (costs.prefill_s(sets), SLOTS.prefill)):
        expected = [part.predict(batch) if batch.num_requests > 0 else 0.0 for batch in batches]
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0)


# ---- all of them


@pytest.mark.parametrize(
    "costs",
    [
        PaddedSetCosts(**COEFFICIENTS),
        RankSetCosts(**COEFFICIENTS),
        StepSetCosts(h200_model(), rank_bytes=1e6),
        SlotSetCosts(SLOTS, num_slots=8, max_rank=64),
    ],
    ids=lambda costs: type(costs).__name__,
)
def test_an_empty_set_takes_no_time(costs: SetCosts) -> None:
    sets = sets_of([], of_rank(8), of_rank(0))
    for seconds in (costs.decode_s(sets), costs.prefill_s(sets)):
        assert seconds.dtype == np.float64
        assert seconds[0] == 0
        assert seconds[1] >= seconds[2] > 0


# ---- sets as routers ask for them

REQUEST = st.tuples(st.sampled_from([0, 8, 16, 64]), st.integers(1, 500), st.integers(1, 900))


@given(st.lists(st.lists(REQUEST, max_size=5), min_size=1, max_size=5), st.data())
def test_sets_at_replicas_are_theirs(batches: list[list[Request]], data: st.DataObject) -> None:
    replicas = sorted(data.draw(st.sets(st.integers(0, len(batches) - 1))))
    found = sets_of(*batches).at(np.array(replicas, np.int64))
    for column, whole in zip(found, sets_of(*batches), strict=True):
        assert column.tolist() == whole[replicas].tolist()
