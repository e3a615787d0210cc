"""Draws on the device against the sampler of the host."""

from __future__ import annotations

import pytest
import torch

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.cuda.device_sampler import draw_tokens, stays_on_device
from loraplex.engine.cuda.small_copies import SmallCopies
from loraplex.engine.draws import gumbel_noise, noise_key
from loraplex.engine.sampler import SamplingState, sample

COPIES = SmallCopies(torch.device("cpu"))


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
    noise = gumbel_noise(torch.arange(len(weights)), *noise_key(state.seed, state.num_output))
    return int((weights.log() + noise).argmax())


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
def test_a_draw_is_the_best_of_those_left_with_its_noise(params: dict[str, float]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 97) * 3
    states = [state_of(seed=seed, **params) for seed in range(40)]
    for index, state in enumerate(states):
        state.num_output = index % 3
    expected = [expected_token(row, state) for row, state in zip(logits, states, strict=True)]
    assert draw_tokens(logits, states, COPIES).tolist() == expected


@pytest.mark.parametrize("params", [{}, {"top_k": 800}, {"top_p": 0.9}, {"min_p": 0.7}], ids=str)
def test_rounding_changes_no_draw(params: dict[str, float]) -> None:
    """A request that goes on elsewhere is read in other pieces, which round otherwise. That changes the order
    of logits that are nearly equal, and which of them are left by the edge of top_k, top_p or min_p."""
    torch.manual_seed(2)
    logits = 0.1 * torch.randn(100, 2000)
    rounded = logits + 1e-5 * torch.randn_like(logits)
    states = [state_of(seed=seed, **params) for seed in range(100)]
    drawn = draw_tokens(logits, states, COPIES).tolist()
    assert drawn == draw_tokens(rounded, states, COPIES).tolist()
    assert drawn == [each.token_id for each in sample(logits, states)]
    assert drawn == [each.token_id for each in sample(rounded, states)]


def test_rows_of_different_settings_do_not_touch_each_other() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 50)
    states = [state_of(seed=1, top_k=1), state_of(seed=2), state_of(seed=3, top_p=0.3)]
    together = draw_tokens(logits, states, COPIES).tolist()
    assert together == [draw_tokens(logits[i : i + 1], states[i : i + 1], COPIES).item() for i in range(3)]


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
        ({"bad_word_ids": ((1, 2),)}, False),
        ({"min_tokens": 2}, False),
    ],
    ids=str,
)
def test_what_needs_history_or_logits_on_the_host_is_left_to_it(
    params: dict[str, object], stays: bool
) -> None:
    assert stays_on_device(state_of(**params)) is stays
