"""The limit of a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex.scheduling.work import StepWork


@given(
    position_cost=st.sampled_from([0.0, 1e-5, 3e-4, 0.01, 2.0]),
    budget=st.floats(1, 5000),
    start=st.integers(0, 200_000),
)
def test_the_most_tokens_that_fit(position_cost: float, budget: float, start: int) -> None:
    work = StepWork(position_cost=position_cost)
    num_tokens = work.tokens_within(budget, start)
    assert num_tokens >= 1
    assert num_tokens == 1 or work.cost(start, num_tokens) <= budget * (1 + 1e-6)
    assert work.cost(start, num_tokens + 1) > budget * (1 - 1e-6)


def test_the_cost_of_a_prompt_is_that_of_its_chunks() -> None:
    work = StepWork(position_cost=0.003)
    parts = work.cost(0, 100) + work.cost(100, 60) + work.cost(160, 1)
    assert abs(work.cost(0, 161) - parts) < 1e-9


def test_a_budget_below_one_token_holds_none() -> None:
    assert StepWork().tokens_within(0.99, 0) == 0
    assert StepWork().tokens_within(-3.0, 0) == 0


def test_prompts_keep_a_share_of_a_step_full_of_decodes() -> None:
    work = StepWork(max_tokens=100)
    assert work.prefill_budget(decode_cost=30) == 70
    assert work.prefill_budget(decode_cost=500) == 25
    assert StepWork(max_tokens=2).prefill_budget(decode_cost=500) == 1
