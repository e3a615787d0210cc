"""Draws on the device against the sampler of the host."""

from __future__ import annotations

import pytest
import torch

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.cuda.device_sampler import draw_tokens, stays_on_device
from loraplex.engine.sampler import SamplingState, sample, uniform


def state_of(**params: object) -> SamplingState:
    return SamplingState(
        EngineRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams(**params))  # type: ignore[arg-type]
    )


def expected_token(logits: torch.Tensor, state: SamplingState) -> int:
    """Temperature, min_p, top_k, top_p and the draw, spelled out one after the other."""
    params = state.params
    weights = torch.softmax(logits.double() / params.temperature, dim=-1)
    weights[weights < params.min_p * weights.max()] = 0
    order = weights.argsort(descending=True, stable=True)
    if params.top_k:
        weights[order[params.top_k :]] = 0
    weights /= weights.sum()
    before = weights[order].cumsum(0) - weights[order]
    weights[order[before >= params.top_p]] = 0
    totals = weights.cumsum(0)
    return int((totals <= uniform(state.seed, state.num_output) * totals[-1]).sum())


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 7, "temperature": 2.0},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
    ],
    ids=str,
)
def test_a_draw_is_where_the_distribution_passes_the_uniform_number(params: dict[str, float]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 97) * 3
    states = [state_of(seed=seed, **params) for seed in range(40)]
    for index, state in enumerate(states):
        state.num_output = index % 3
    expected = [expected_token(row, state) for row, state in zip(logits, states, strict=True)]
    assert draw_tokens(logits, states).tolist() == expected


@pytest.mark.parametrize("params", [{}, {"top_k": 35}, {"top_p": 0.999}], ids=str)
def test_rounding_of_nearly_equal_logits_changes_no_draw(params: dict[str, float]) -> None:
    """A request that goes on elsewhere is read in other pieces, which round otherwise."""
    logits = torch.zeros(200, 40)
    torch.manual_seed(2)
    rounded = logits + torch.randn_like(logits) * 1e-6
    logits[:, 35:] = rounded[:, 35:] = -20.0  # the rest is in the nucleus, whichever way it is rounded
    states = [state_of(seed=seed, **params) for seed in range(200)]
    drawn = draw_tokens(logits, states).tolist()
    assert drawn == draw_tokens(rounded, states).tolist()
    assert drawn == [each.token_id for each in sample(logits, states)]
    assert drawn == [each.token_id for each in sample(rounded, states)]


def test_rows_of_different_settings_do_not_touch_each_other() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 50)
    states = [state_of(seed=1, top_k=1), state_of(seed=2), state_of(seed=3, top_p=0.3)]
    together = draw_tokens(logits, states).tolist()
    assert together == [draw_tokens(logits[i : i + 1], states[i : i + 1]).item() for i in range(3)]


@pytest.mark.parametrize(
    ("params", "stays"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 1}, True),
        ({"logprobs": 0}, False),
        ({"presence_penalty": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": ((1, 2.0),)}, False),
        ({"min_tokens": 2}, False),
    ],
    ids=str,
)
def test_what_needs_history_or_logits_on_the_host_is_left_to_it(
    params: dict[str, object], stays: bool
) -> None:
    assert stays_on_device(state_of(**params)) is stays
