"""Figures of an outcome: who met an objective, and which adapter waited for long."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from twins import own_twin, random_workload

from loraplex.twin.outcome import Outcome, RequestOutcome
from loraplex.twin.slo import Slo
from loraplex.workload.jsonl import WorkloadRequest


def outcome_of(*requests: RequestOutcome) -> Outcome:
    return Outcome(
        requests=requests,
        duration_s=10.0,
        num_steps=1,
        num_loads=0,
        num_preemptions=0,
        mean_running=1.0,
        mean_waiting=0.0,
        gaps=(),
    )


def asked(adapter: int = 0, arrival_s: float = 1.0) -> WorkloadRequest:
    return WorkloadRequest(arrival_s=arrival_s, prompt_tokens=5, output_tokens=10, adapter=adapter)


def test_requests_that_were_not_served_miss_the_objective() -> None:
    outcome = outcome_of(
        RequestOutcome(asked(), first_token_s=1.1, finish_s=2.0),  # 0.1 s a token
        RequestOutcome(asked(), first_token_s=2.5, finish_s=3.0),  # 0.2 s a token
        RequestOutcome(asked(), first_token_s=1.1),  # 0.9 s a token at the least
        RequestOutcome(asked(), finish_s=1.2, failed=True),
        RequestOutcome(asked(), lost=True),
    )
    attained = [outcome.slo_attainment(Slo(tpt_s=tpt_s)) for tpt_s in (0.05, 0.1, 0.15, 0.2, 0.8)]
    assert attained == [0.0, 0.2, 0.2, 0.4, 0.4]


@pytest.mark.parametrize(
    ("slo", "counts"),
    [
        (Slo(), (1, 0, 3)),
        (Slo(ttft_s=10.0), (1, 0, 3)),
        (Slo(ttft_s=5.0), (1, 1, 2)),  # one has waited for longer
        (Slo(ttft_s=0.5), (0, 3, 1)),
        (Slo(tpt_s=1.0), (1, 0, 3)),
        (Slo(tpt_s=0.5), (1, 2, 1)),  # 10 tokens within 5 s are not to be had any more
        (Slo(tpot_s=0.5), (1, 1, 2)),  # without a first token there is no pace yet
    ],
)
def test_what_the_end_interrupts_has_missed_the_objective_or_is_left_out(
    slo: Slo, counts: tuple[int, int, int]
) -> None:
    outcome = outcome_of(  # which ends at 10 s
        RequestOutcome(asked(), first_token_s=2.0, finish_s=3.0),
        RequestOutcome(asked(), first_token_s=1.75),
        RequestOutcome(asked()),
        RequestOutcome(asked(arrival_s=9.75)),
    )
    assert outcome.slo_counts(slo) == counts
    assert outcome.slo_attainment(slo) == counts[0] / (counts[0] + counts[1])
    assert outcome.summary()["num_unfinished"] == 3


def test_where_nobody_asked_nothing_is_missed() -> None:
    assert outcome_of().slo_attainment(Slo(tpt_s=0.1)) == 1.0
    assert outcome_of().ttft_p99_by_adapter() == {}


def test_attainment_is_the_share_below_a_percentile_of_the_summary() -> None:
    outcome = own_twin(num_blocks=400).run(random_workload(1, num_requests=200))
    summary = outcome.summary()
    for name, share in (("p50", 0.5), ("p95", 0.95)):
        assert outcome.slo_attainment(Slo(tpt_s=summary["tpt_s"][name])) == share
        assert outcome.slo_attainment(Slo(ttft_s=summary["ttft_s"][name])) == share


def test_a_request_attains_the_objective_within_all_limits_that_are_given() -> None:
    outcome = outcome_of(
        RequestOutcome(asked(), first_token_s=1.25, finish_s=2.0),  # 0.1 s a token
        RequestOutcome(asked(), first_token_s=2.5, finish_s=3.0),  # 0.2 s a token
        RequestOutcome(asked(), first_token_s=1.25, finish_s=6.0),  # 0.5 s a token
        RequestOutcome(asked(), lost=True),
        RequestOutcome(asked(), first_token_s=1.25, finish_s=1.5, failed=True),
    )
    for slo, share in (
        (Slo(ttft_s=0.25), 0.4),
        (Slo(ttft_s=0.2), 0.0),
        (Slo(ttft_s=1.5), 0.6),
        (Slo(tpt_s=0.2), 0.4),
        (Slo(tpt_s=0.2, ttft_s=1.0), 0.2),
        (Slo(tpt_s=0.2, ttft_s=1.5), 0.4),
        (Slo(tpot_s=0.75 / 9), 0.4),
        (Slo(tpot_s=0.5 / 9), 0.2),
        (Slo(tpot_s=0.5 / 9, ttft_s=1.0), 0.0),
        (Slo(), 0.6),
    ):
        assert outcome.slo_attainment(slo) == share, slo


def test_an_answer_of_one_token_has_no_pace_to_miss() -> None:
    one = WorkloadRequest(arrival_s=0.0, prompt_tokens=5, output_tokens=1, adapter=0)
    outcome = outcome_of(RequestOutcome(one, first_token_s=3.0, finish_s=3.0))
    assert outcome.slo_attainment(Slo(tpot_s=1e-6)) == 1.0
    assert outcome.slo_attainment(Slo(tpot_s=1e-6, ttft_s=2.0)) == 0.0


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        (Slo(tpt_s=0.03012), "within 30.1 ms per token"),
        (Slo(ttft_s=0.5), "within 500 ms to the first token"),
        (Slo(tpot_s=0.006), "within 6 ms per token after the first"),
        (Slo(tpt_s=0.03012, ttft_s=10.0), "within 30.1 ms per token and 10 s to the first token"),
        (Slo(), "served"),
    ],
)
def test_an_objective_in_words(slo: Slo, words: str) -> None:
    assert slo.in_words() == words


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 100.0) | st.none()), max_size=60))
def test_the_wait_of_each_adapter_is_the_percentile_of_its_requests(
    waits: list[tuple[int, float | None]],
) -> None:
    outcome = outcome_of(
        *(RequestOutcome(asked(adapter, arrival_s=0.0), first_token_s=wait_s) for adapter, wait_s in waits)
    )
    by_adapter = {
        adapter: [wait_s for other, wait_s in waits if other == adapter and wait_s is not None]
        for adapter, wait_s in waits
        if wait_s is not None
    }
    found = outcome.ttft_p99_by_adapter()
    assert found.keys() == by_adapter.keys()
    for adapter, waits_s in by_adapter.items():
        assert found[adapter] == pytest.approx(float(np.percentile(waits_s, 99)))
