"""`loraplex fleet capacity`: the highest rate at which an SLO holds, and the limits that it is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fleet_commands import fleet, later, written

from loraplex.cli.fleet_show import capacity_in_words
from loraplex.core.errors import UserError
from loraplex.twin.fleet_compare import Capacity
from loraplex.workload.jsonl import WorkloadRequest, read_workload, write_workload


def test_requests_at_one_moment_have_no_rate(profile: Path, workload: Path) -> None:
    write_workload(workload, [replace(each, arrival_s=1.0) for each in read_workload(workload)])
    result = fleet("capacity", profile, workload, "--replicas", "2", "--policies", "random")
    assert "all requests come at one moment, so that there is no rate to change" in str(result.exception)


@pytest.mark.slow
def test_capacity_does_not_depend_on_when_times_begin(profile: Path, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = (
        "--replicas", "1", "--policies", "round-robin", "--attainment", "0.9", "--slo-tpt", "12ms",
        "--max-running", "8", "--seconds", "2", "--json", str(out),
    )  # fmt: skip
    rates = []
    for path in (workload, later(workload, 1e6)):
        result = fleet("capacity", profile, path, *args)
        assert result.exit_code == 0, result.output
        rates.append(written(out)["capacity_rps"]["round-robin+everywhere"])
    assert rates[0] > 1
    assert rates[1] == pytest.approx(rates[0], rel=1e-4)


def test_capacity_is_found_by_bisection(profile: Path, workload: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    args = (
        "--replicas", "2", "--policies", "round-robin", "--attainment", "0.9", "--slo-tpt", "12ms",
        "--max-running", "8", "--json", str(out), "--plot", str(plot),
    )  # fmt: skip
    result = fleet("capacity", profile, workload, *args)
    assert result.exit_code == 0, result.output
    found = written(out)
    rate = found["capacity_rps"]["round-robin+everywhere"]
    seconds, number = (found[key]["round-robin+everywhere"] for key in ("trial_s", "trial_requests"))
    assert f"requests/s, in a trial of {seconds:,.0f} s with {number:,} requests" in result.output
    tried = found["tried"]["round-robin+everywhere"]
    assert rate == max(each for each, attained in tried if attained >= 0.9)
    assert min(each for each, attained in tried if attained < 0.9) <= rate * 1.021
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_capacity_is_told_by_enough_requests_or_not_at_all(
    profile: Path, workload: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    args = (
        "--replicas", "2", "--policies", "round-robin", "--slo-tpt", "12ms", "--max-running", "8",
        "--json", str(out), "--attainment",
    )  # fmt: skip
    for attainment, number in (("0.96", 360), ("0.95", 240)):
        result = fleet("capacity", profile, workload, *args, attainment)
        assert "too few" not in result.output
        assert written(out)["trial_requests"]["round-robin+everywhere"] >= number > 120
    found = Capacity(
        rps=0.00123,
        tried=[(0.00123, 1.0)],
        trial_s=60.0,
        least_s=6.0,
        trial_requests=120,
        least_requests=100_000,
    )
    assert "0.00123 requests/s, in a trial of 60 s with 120 requests; too few" in capacity_in_words(found)
    assert "it takes 100,000" in capacity_in_words(found)


@pytest.mark.slow
def test_capacity_by_the_time_to_the_first_token(profile: Path, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = (
        "--replicas", "2", "--policies", "round-robin", "--attainment", "0.95", "--slo-ttft", "100ms",
        "--max-running", "8", "--json", str(out),
    )  # fmt: skip
    result = fleet("capacity", profile, workload, *args)
    assert result.exit_code == 0, result.output
    words = "95.0% of requests within 100 ms to the first token; rates are found to within 2%"
    assert words in result.output
    found = written(out)
    assert found["slo_tpt_s"] is None
    assert found["slo_ttft_s"] == pytest.approx(0.1)
    alone = found["capacity_rps"]["round-robin+everywhere"]
    result = fleet("capacity", profile, workload, *args, "--slo-tpt", "9ms")
    assert "within 9 ms per token and 100 ms to the first token" in result.output
    assert written(out)["capacity_rps"]["round-robin+everywhere"] < alone, "both limits hold"


NINE_OF_TEN = ("--attainment", "0.9")
"""A tenth of the requests that the usual 99% take to tell."""


@pytest.mark.parametrize(
    ("policy", "options", "share"),
    [
        pytest.param("most-idle", (), "99.0%", marks=pytest.mark.slow),
        ("most-idle", ("--seconds", "1", *NINE_OF_TEN), "90.0%"),
        pytest.param("random+everywhere+migrate", NINE_OF_TEN, "90.0%", marks=pytest.mark.slow),
        ("random+everywhere+migrate", ("--seconds", "1", *NINE_OF_TEN), "90.0%"),
    ],
)
def test_an_slo_that_no_rate_can_hold_is_refused(
    profile: Path, workload: Path, policy: str, options: tuple[str, ...], share: str
) -> None:
    args = ("--replicas", "1", "--policies", policy, "--slo-tpt", "0.01ms", *options)
    result = fleet("capacity", profile, workload, *args)
    assert isinstance(result.exception, UserError), result.output
    words = f"at no rate, however low, are {share} of requests within 0.01 ms per token"
    assert words in str(result.exception)
    assert str(result.exception).endswith("; relax --slo-tpt or --attainment")


def test_a_policy_that_no_rate_suits_leaves_the_others_their_capacity(profile: Path, tmp_path: Path) -> None:
    out, plot, path = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "pairs.jsonl"
    pairs = [  # both at the same time, at every rate: only apart do they start soon enough
        WorkloadRequest(arrival_s=float(arrival_s), prompt_tokens=100, output_tokens=1, adapter=adapter)
        for arrival_s in range(20)
        for adapter in (0, 1)
    ]
    write_workload(path, pairs)
    args = (
        "--replicas", "2", "--policies", "first-fit,round-robin", "--attainment", "1", "--slo-ttft", "60ms",
        "--json", str(out), "--plot", str(plot),
    )  # fmt: skip
    result = fleet("capacity", profile, path, *args)
    assert result.exit_code == 0, result.output
    found = written(out)
    assert found["capacity_rps"]["round-robin+everywhere"] > 1
    assert found["capacity_rps"]["first-fit+everywhere"] is None
    best = max(attained for _, attained in found["tried"]["first-fit+everywhere"])
    reason = f"at no rate, however low; the most was {best:.1%}"
    assert found["reasons"] == {"first-fit+everywhere": reason}
    lines = [line.split(maxsplit=1) for line in result.output.splitlines()]
    assert ["first-fit+everywhere", reason] in lines
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("limits", "advice"),
    [
        (("--slo-ttft", "0.1ms"), "relax --slo-ttft or --attainment"),
        (("--slo-ttft", "0.1ms", "--slo-tpt", "90ms"), "relax --slo-tpt or --slo-ttft or --attainment"),
    ],
)
def test_a_refused_slo_says_which_options_to_relax(
    profile: Path, workload: Path, limits: tuple[str, ...], advice: str
) -> None:
    args = ("--replicas", "1", "--policies", "most-idle", "--seconds", "1", *NINE_OF_TEN, *limits)
    result = fleet("capacity", profile, workload, *args)
    assert isinstance(result.exception, UserError), result.output
    assert "0.1 ms to the first token; the most was" in str(result.exception)
    assert str(result.exception).endswith(advice)
