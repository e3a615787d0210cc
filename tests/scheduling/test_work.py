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


@given(
    position_cost=st.sampled_from([0.0, 4e-5, 9e-4]),
    max_tokens=st.integers(1, 5000),
    num_tokens=st.integers(1, 20_000),
)
def test_a_prompt_is_cut_into_as_few_parts_as_fit_and_none_is_a_rest(
    position_cost: float, max_tokens: int, num_tokens: int
) -> None:
    work = StepWork(max_tokens=max_tokens, position_cost=position_cost)
    start, parts = 0, []
    while start < num_tokens:
        parts.append(work.chunk(num_tokens - start, start, max_tokens))
        assert 1 <= parts[-1] <= min(max_tokens, work.tokens_within(1.25 * max_tokens, start))
        start += parts[-1]
    fewest, filled = 0, 0
    while filled < num_tokens:
        filled += min(max_tokens, work.tokens_within(1.25 * max_tokens, filled))
        fewest += 1
    assert len(parts) <= fewest + 1
    costs = [work.cost(sum(parts[:index]), part) for index, part in enumerate(parts)]
    assert min(costs) >= sum(costs) / len(costs) - 64 * len(parts) * (1 + position_cost * num_tokens)


def test_the_cost_of_a_prompt_is_that_of_its_chunks() -> None:
    work = StepWork(position_cost=0.003)
    parts = work.cost(0, 100) + work.cost(100, 60) + work.cost(160, 1)
    assert abs(work.cost(0, 161) - parts) < 1e-9


def test_a_prompt_a_little_beyond_a_step_takes_two_halves() -> None:
    work = StepWork(max_tokens=2048, position_cost=4e-5)
    assert work.chunk(2112, 0, 2048) == 1088
    assert work.chunk(1024, 1088, 2048) == 1024


def test_context_does_not_cut_a_prompt_whose_tokens_fit() -> None:
    work = StepWork(max_tokens=2048, position_cost=4e-5)
    assert work.cost(0, 2048) > 2048
    assert work.chunk(2048, 0, 2048) == 2048
    assert work.chunk(8000, 0, 2048) == 2048
    assert work.chunk(1856, 6144, 2048) == 1856
    far = work.chunk(2048, 100_000, 2048)
    assert far < 2048, "what is far behind costs several times as much"
    assert work.cost(100_000, far) <= 1.25 * 2048


def test_a_budget_below_one_token_holds_none() -> None:
    assert StepWork().chunk(5, 0, 0.99) == 0
    assert StepWork().tokens_within(0.99, 0) == 0
    assert StepWork().tokens_within(-3.0, 0) == 0


def test_prompts_keep_a_share_of_a_step_full_of_decodes() -> None:
    work = StepWork(max_tokens=100)
    assert work.prefill_budget(decode_cost=30) == 70
    assert work.prefill_budget(decode_cost=500) == 25
    assert StepWork(max_tokens=2).prefill_budget(decode_cost=500) == 1
