"""Tenants in simulations: their figures, and what the server in front of an engine refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twin_commands import profile_in, twin
from twins import imagined_machine, random_workload
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.tenants import TenantPolicy
from loraplex.fleet.policy import Policy
from loraplex.twin.fleet import FleetOutcome
from loraplex.twin.fleet_run import FleetOptions, FleetRuns
from loraplex.twin.outcome import RequestOutcome
from loraplex.twin.replay import ReplayOptions
from loraplex.twin.slo import NO_SLO, Slo
from loraplex.twin.tenant_figures import fair_parts, fairness, jain, tenant_figures
from loraplex.workload.jsonl import WorkloadRequest, read_workload, write_workload

POLICIES = (TenantPolicy(name="a", slo_ttft=1.0), TenantPolicy(name="b", slo_ttft=1.0))


def tenanted(rps: float, num_requests: int = 120) -> list[WorkloadRequest]:
    """Return requests, nine in ten of which are of tenant a."""
    made = random_workload(3, num_requests=num_requests, num_adapters=4, rps=rps)
    return [replace(each, tenant="a" if number % 10 else "b") for number, each in enumerate(made)]


def run(workload: list[WorkloadRequest], num_replicas: int = 1, **options: object) -> FleetOutcome:
    chosen: dict[str, Any] = {"max_running": 4} | options
    replay = ReplayOptions(num_adapters=4, ranks=(8,), **chosen)
    runs = FleetRuns(imagined_machine(), workload, FleetOptions(num_replicas=num_replicas, replay=replay))
    return runs.run(Policy.of("most-idle", None))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_under_overload_whoever_asks_for_more_than_its_share_is_refused(num_replicas: int) -> None:
    outcome = run(tenanted(400.0 * num_replicas), num_replicas, tenants=POLICIES)
    figures = tenant_figures(outcome.all.requests, POLICIES, duration_s=outcome.all.duration_s, slo=NO_SLO)
    refused = {name: each.num_refused / each.num_requests for name, each in figures.items()}
    assert refused["a"] > 2 * refused["b"], (refused, figures)
    assert figures["b"].attainment > figures["a"].attainment
    for each, chosen in zip(outcome.all.requests, outcome.chosen, strict=True):
        assert each.refused is (chosen is None)
        assert each.refused or each.is_served
    counts = [row.num_requests for row in outcome.replicas]
    assert sum(counts) == sum(not each.refused for each in outcome.all.requests)
    assert len(outcome.timelines(10)) == num_replicas


def test_without_limits_nothing_is_refused_and_a_limit_refuses_without_tenants() -> None:
    workload = [replace(each, tenant="") for each in tenanted(400.0)]
    assert not any(each.refused for each in run(workload).all.requests)
    limited = run(workload, max_ttft_s=0.5).all
    assert 0 < limited.summary()["num_refused"] < len(workload)
    late = [each for each in limited.requests if each.ttft_s is not None and each.ttft_s > 0.5]
    assert len(late) < 0.1 * len(workload)


def test_no_more_wait_than_may() -> None:
    outcome = run(tenanted(5000.0), max_waiting=10, tenants=(TenantPolicy(name="a"), TenantPolicy(name="b")))
    figures = tenant_figures(outcome.all.requests, (), duration_s=1.0, slo=NO_SLO)
    assert figures["a"].num_refused > 80


def test_a_bounded_tenant_is_let_in_no_faster_than_it_is_served() -> None:
    outcome = run(tenanted(400.0, 600), tenants=POLICIES, max_borrowing=0.0)
    figures = tenant_figures(outcome.all.requests, POLICIES, duration_s=1.0, slo=NO_SLO)
    noisy = figures["a"]
    assert noisy.num_refused > 100
    served = noisy.num_requests - noisy.num_refused
    assert noisy.attainment * noisy.num_requests > 0.5 * served, (noisy, served)


def test_objectives_for_the_time_per_token_are_kept_by_refusing_requests() -> None:
    aim_s, workload = 0.01, tenanted(200.0, 500)

    def share_in_time(aim: float | None) -> float:
        policies = tuple(TenantPolicy(name=name, slo_tpt=aim) for name in "ab")
        found = run(workload, tenants=policies, max_running=64).all.requests
        seen = [each.tpot_s for each in found if each.tpot_s is not None]
        assert any(each.refused for each in found) is (aim is not None)
        return sum(each <= aim_s for each in seen) / len(seen)

    assert share_in_time(None) < 0.6
    assert share_in_time(aim_s) > 0.9


def outcome_of(tenant: str, ttft_s: float | None, *, refused: bool = False) -> RequestOutcome:
    request = WorkloadRequest(arrival_s=0.0, prompt_tokens=10, output_tokens=5, adapter=0, tenant=tenant)
    finish_s = None if ttft_s is None else ttft_s + 0.4
    return RequestOutcome(request, first_token_s=ttft_s, finish_s=finish_s, refused=refused)


def test_the_figures_of_a_tenant_are_of_its_own_requests_and_its_own_objectives() -> None:
    requests = [outcome_of("a", 0.5), outcome_of("a", 2.0), outcome_of("a", None, refused=True)]
    requests += [outcome_of("b", 2.0)]
    policies = [TenantPolicy(name="a", share=3.0, slo_ttft=1.0)]
    figures = tenant_figures(requests, policies, duration_s=10.0, slo=Slo(ttft_s=3.0))
    own, other = figures["a"], figures["b"]
    assert (own.num_requests, own.num_served, own.num_refused, own.share) == (3, 2, 1, 3.0)
    assert (own.attainment, own.goodput_rps) == (pytest.approx(1 / 3), pytest.approx(0.1))
    assert (other.attainment, other.share, other.ttft_p95_s) == (1.0, 1.0, 2.0)
    assert (own.demand, own.service) == (60.0, 40.0)


def test_what_some_leave_is_divided_among_the_others_by_their_shares() -> None:
    assert fair_parts([10, 100, 100], [1, 1, 2], 100) == [10, 30, 60]
    assert fair_parts([5, 5], [1, 9], 100) == [5, 5]
    assert fair_parts([0, 7], [1, 1], 3) == [0, 3]


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0.01, 100)), min_size=1, max_size=8), st.floats(0, 1e6)
)
def test_parts_are_no_more_than_what_is_asked_for_and_all_that_there_is(
    asked: list[tuple[float, float]], total: float
) -> None:
    demands, shares = [each for each, _ in asked], [each for _, each in asked]
    parts = fair_parts(demands, shares, total)
    assert all(0 <= part <= demand * (1 + 1e-9) for part, demand in zip(parts, demands, strict=True))
    assert sum(parts) == pytest.approx(min(total, sum(demands)), rel=1e-6, abs=1e-6)


def test_jains_index_is_one_if_all_get_as_much_and_less_otherwise() -> None:
    assert jain([3.0, 3.0, 3.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain([0.0]) == 1.0
    figures = tenant_figures([outcome_of("a", 1.0), outcome_of("b", 1.0)], (), duration_s=1.0, slo=NO_SLO)
    assert fairness(figures) == 1.0


def test_a_workload_is_made_and_simulated_with_tenants(tmp_path: Path) -> None:
    made, out = tmp_path / "made.jsonl", tmp_path / "out.json"
    asked = [
        "workload",
        "make",
        str(made),
        "--tenants",
        "big:9,small",
        "--num-requests",
        "80",
        "--rate",
        "200",
    ]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    tenants = [each.tenant for each in read_workload(made)]
    assert set(tenants) == {"big", "small"}
    assert tenants.count("big") > 4 * tenants.count("small")
    profile = profile_in(tmp_path, "ours")
    rights = ("--tenant", "big:share=1,slo-ttft=200ms", "--tenant", "small:share=1,slo-ttft=2s,priority=-1")
    result = twin("run", profile, made, *rights, "--max-running", "4", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "tenant big: " in result.output
    assert "fairness (Jain" in result.output
    summary = json.loads(out.read_text())["summary"]
    assert summary["tenants"]["big"]["num_refused"] == summary["num_refused"] > 0


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--tenant", "a:speed=3", "'speed=3' is unknown or given twice; there are share, priority"),
        ("--tenant", "a:share=-1", "'-1' is no share"),
        ("--tenant", ":share=1", "it has no name"),
        ("--max-borrowing", "much", "is no share; write it like 10%"),
        ("--max-ttft", "soon", "is no time; write it like 2s or 500ms"),
        ("--max-ttft", "nan", "is no time"),
    ],
)
def test_options_that_are_wrong_say_how_to_write_them(
    tmp_path: Path, option: str, value: str, words: str
) -> None:
    workload = tmp_path / "w.jsonl"
    write_workload(workload, tenanted(5.0, num_requests=3))
    result = twin("run", profile_in(tmp_path, "ours"), workload, option, value)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())
