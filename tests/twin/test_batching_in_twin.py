"""Batching policies on a virtual clock."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from test_leaps import assert_same
from twin_commands import twin
from twins import imagined_machine, own_twin, random_workload
from typer import BadParameter

from loraplex.cli.serve_options import refuse_max_ttft_with, refuse_tenants_with
from loraplex.core.batching import Batching, DelayBound
from loraplex.core.errors import UserError
from loraplex.core.tenants import TenantPolicy
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.twin.outcome import Outcome
from loraplex.twin.replay import ReplayOptions, check_options, check_workload, replay
from loraplex.workload.jsonl import WorkloadRequest, write_workload

BOUND = DelayBound()


def profile() -> CostModel:
    found = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(found, CostModel)
    return found


def burst(num_requests: int, num_adapters: int) -> list[WorkloadRequest]:
    rng = random.Random(1)
    return [
        WorkloadRequest(
            arrival_s=0.0,
            prompt_tokens=rng.randint(64, 192),
            output_tokens=rng.randint(16, 64),
            adapter=rng.randrange(num_adapters),
        )
        for _ in range(num_requests)
    ]


@pytest.mark.parametrize("batching", list(Batching))
def test_twin_run_simulates_every_policy(batching: Batching, tmp_path: Path) -> None:
    workload = tmp_path / "workload.jsonl"
    write_workload(workload, burst(60, 6))
    result = twin("run", Path("h200-llama-2-7b"), workload, "--batching", batching, "--max-running", "8")
    assert result.exit_code == 0, result.output
    assert "60" in result.output
    assert ("adapters a step" in result.output) == (batching not in (Batching.FCFS, Batching.GROUPED))


@pytest.mark.parametrize("batching", list(Batching))
def test_gaps_between_tokens_have_the_pauses_in_them(batching: Batching) -> None:
    options = ReplayOptions(num_adapters=6, staged=True, max_running=8, batching=batching)
    summary = replay(profile(), burst(60, 6), options).summary()
    assert summary["itl_s"]["mean"] == pytest.approx(summary["itl_mean_s"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batching", "auto", "--max-delay-by-grouping", "soon"), "'soon' is no bound"),
        (("--batching", "auto", "--max-delay-by-grouping", "5%,6%"), "write it like 25%,250ms"),
        (
            ("--batching", "fcfs", "--max-delay-by-grouping", "5%"),
            "the bound is for batching by grouped or auto",
        ),
        (
            (
                "--batching",
                "later",
            ),
            "there is no batching policy 'later'",
        ),
    ],
)
def test_a_bound_that_means_nothing_is_refused(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    workload = tmp_path / "workload.jsonl"
    write_workload(workload, burst(2, 2))
    result = twin("run", Path("h200-llama-2-7b"), workload, *options)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


def test_grouped_admission_serves_a_long_queue_faster_within_the_bound() -> None:
    workload = burst(1200, 100)
    options = {"num_adapters": 100, "ranks": (64,), "staged": True, "max_running": 64}
    fcfs = replay(profile(), workload, ReplayOptions(**options))  # type: ignore[arg-type]
    grouped = replay(profile(), workload, ReplayOptions(**options, batching=Batching.GROUPED))  # type: ignore[arg-type]
    assert grouped.duration_s < 0.99 * fcfs.duration_s
    for one, other in zip(grouped.requests, fcfs.requests, strict=True):
        assert one.ttft_s is not None
        assert other.ttft_s is not None
        assert one.ttft_s - other.ttft_s <= BOUND.allowed_s(other.ttft_s)


def test_grouped_admission_changes_nothing_while_the_queue_is_short() -> None:
    workload = random_workload(3, num_requests=60, rps=2.0)
    fcfs = own_twin(num_blocks=400).run(workload)
    grouped = own_twin(num_blocks=400, batching=Batching.GROUPED).run(workload)
    expected = [each.finish_s for each in fcfs.requests]
    assert [each.finish_s for each in grouped.requests] == pytest.approx(expected, rel=1e-9)


def test_auto_merges_an_adapter_that_all_requests_are_on() -> None:
    workload = burst(64, 1)
    options = {"num_adapters": 1, "ranks": (128,), "staged": True}
    fcfs = replay(profile(), workload, ReplayOptions(**options))  # type: ignore[arg-type]
    auto = replay(profile(), workload, ReplayOptions(**options, batching=Batching.AUTO))  # type: ignore[arg-type]
    base = replay(profile(), workload, ReplayOptions(num_adapters=0))
    assert base.duration_s < auto.duration_s < fcfs.duration_s


@pytest.mark.parametrize("batching", [each for each in Batching if each is not Batching.FCFS])
@pytest.mark.parametrize("ahead", [False, True])
def test_leaps_are_the_steps_that_they_stand_for(batching: Batching, ahead: bool) -> None:
    workload = [
        replace(each, adapter=each.adapter if number % 4 == 0 else 0)
        for number, each in enumerate(random_workload(5, rps=50.0))
    ]
    runs = [own_twin(batching=batching, ahead=ahead, leaps=leaps).run(workload) for leaps in (True, False)]
    assert all((run.num_merged_steps > 0) == batching.merges for run in runs)
    assert all((run.num_pauses > 0) == batching.merges for run in runs)
    ends = [
        [time_s for each in run.requests for time_s in (each.first_token_s, each.finish_s)] for run in runs
    ]
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)


@pytest.mark.parametrize("ahead", [False, True])
def test_grouped_admission_leaps_while_nobody_waits(ahead: bool) -> None:
    """Each burst makes a long queue, and has been served when the next one comes."""
    workload = [
        replace(each, arrival_s=each.arrival_s + 6.0 * number)
        for number in range(2)
        for each in random_workload(6163 + number, num_adapters=5, rps=80.0)
    ]
    options = {"num_adapters": 5, "num_blocks": 150, "position_cost": 0.001, "ahead": ahead}
    leaping, stepping = (
        own_twin(batching=Batching.GROUPED, leaps=leaps, **options).run(workload)  # type: ignore[arg-type]
        for leaps in (True, False)
    )
    assert_same(leaping, stepping)
    assert num_leapt(leaping) > 20
    assert num_leapt(stepping) == 0


def num_leapt(outcome: Outcome) -> int:
    """Return the number of steps that were simulated in leaps of several."""
    return sum(num_steps for _, _, num_steps, _ in outcome.gaps if num_steps > 1)


@pytest.mark.parametrize("batching", list(Batching))
def test_first_tokens_are_bounded_only_where_they_can_be_predicted(batching: Batching) -> None:
    if batching in (Batching.MERGED, Batching.DYNAMIC):
        with pytest.raises(BadParameter, match="first tokens cannot be predicted"):
            refuse_max_ttft_with(batching, 2.0)
    else:
        refuse_max_ttft_with(batching, 2.0)
    refuse_max_ttft_with(batching, None)


@pytest.mark.parametrize("batching", list(Batching))
def test_tenants_are_refused_with_policies_that_know_none(batching: Batching) -> None:
    workload = [replace(each, tenant="acme") for each in random_workload(1, num_requests=3)]
    of_tenants = ReplayOptions(num_adapters=8, batching=batching, tenants=(TenantPolicy(name="acme"),))
    borrowing = replace(of_tenants, tenants=(), max_borrowing=0.1)
    if batching not in (Batching.MERGED, Batching.DYNAMIC):
        refuse_tenants_with(batching, Path("tenants.toml"), 0.1)
        check_workload(workload, of_tenants)
        for options in (of_tenants, borrowing):
            check_options(imagined_machine(), options)
        return
    for given in ((Path("tenants.toml"), None), (None, 0.1)):
        with pytest.raises(BadParameter, match=r"knows no tenants, .*choose fcfs, grouped or auto"):
            refuse_tenants_with(batching, *given)
    refuse_tenants_with(batching, None, None)
    with pytest.raises(UserError, match="request 1 of the workload is of tenant 'acme'"):
        check_workload(workload, of_tenants)
    for options in (of_tenants, borrowing):
        with pytest.raises(UserError, match="leave --tenant and --max-borrowing out"):
            check_options(imagined_machine(), options)
