"""`loraplex fleet`: what it prints, writes, draws and refuses."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from recorded import TRUTH
from twins import imagined_machine, random_workload
from typer.testing import CliRunner

from loraplex import __version__
from loraplex.cli.fleet_plot import draw_policies
from loraplex.cli.fleet_show import capacity_in_words
from loraplex.cli.main import app
from loraplex.core.errors import StorageError, UserError
from loraplex.fleet.policy import PLACEMENTS, ROUTINGS
from loraplex.perf.profile_json import write_profile
from loraplex.perf.slot_profile import write_slot_profile
from loraplex.twin.fleet_compare import Capacity, PolicyRun
from loraplex.twin.fleet_figures import PolicyFigures
from loraplex.twin.slo import Slo
from loraplex.workload.jsonl import WorkloadRequest, read_workload, write_workload

FIGURES = {
    "attainment", "num_undecided", "ttft_p95_s", "tpot_mean_s", "tpt_mean_s", "adapter_loads",
    "busiest_over_mean", "bytes_moved",
}  # fmt: skip


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write_profile(path, imagined_machine())
    return path


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.jsonl"
    write_workload(path, random_workload(3, num_requests=120, num_adapters=9, rps=40.0))
    return path


def fleet(command: str, profile: Path, workload: Path, *args: str) -> Result:
    files = ("--profile", str(profile), "--workload", str(workload), "--adapter-mib", "8")
    return CliRunner().invoke(app, ["fleet", command, *files, *args])


def written(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_fleet_is_simulated(profile: Path, workload: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    result = fleet(
        "simulate", profile, workload, "--replicas", "3", "--routing", "round-robin", "--link", "200Gb/s",
        "--json", str(out), "--plot", str(plot),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "120 of 120 requests served" in result.output
    assert "over 3 replicas" in result.output
    assert "GB fetched" in result.output
    found = written(out)
    assert found["policy"] == "round-robin+everywhere"
    assert found["figures"].keys() == FIGURES
    assert [each["num_requests"] for each in found["replicas"]] == [40, 40, 40]
    assert found["summary"]["num_served"] == 120
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_burst_beyond_all_capacity_is_called_an_overload(profile: Path, tmp_path: Path) -> None:
    """However short it is: nobody would be answered in time."""
    burst = tmp_path / "burst.jsonl"
    write_workload(burst, random_workload(3, num_requests=400, num_adapters=9, rps=100_000.0))
    result = fleet("simulate", profile, burst, "--replicas", "2", "--routing", "random")
    assert "overloaded: it serves less than 90% of what is asked for; most wait at replica" in result.output
    result = fleet("compare", profile, burst, "--replicas", "2", "--policies", "random", "--seeds", "1")
    assert "overloaded under random+everywhere: it serves less than 90%" in result.output


def test_a_queue_that_shrinks_before_the_last_requests_come_is_no_overload(
    slots: Path, tmp_path: Path
) -> None:
    """A slow first load and a burst make a queue, and the last requests, one at a time, find none."""
    path = tmp_path / "early.jsonl"
    burst = random_workload(3, num_requests=120, num_adapters=9, rps=400.0)
    tail = [
        WorkloadRequest(arrival_s=1.0 + 0.05 * number, prompt_tokens=10, output_tokens=2, adapter=number % 9)
        for number in range(60)
    ]
    write_workload(path, [*(each for each in burst if each.arrival_s < 1.0), *tail])
    out = tmp_path / "out.json"
    result = slot_fleet("simulate", slots, path, "--routing", "random", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert written(out)["summary"]["starved"], "or the test shows nothing"
    assert "overloaded" not in result.output


def test_requests_at_one_moment_have_no_rate(profile: Path, workload: Path) -> None:
    write_workload(workload, [replace(each, arrival_s=1.0) for each in read_workload(workload)])
    result = fleet("capacity", profile, workload, "--replicas", "2", "--policies", "random")
    assert "all requests come at one moment, so that there is no rate to change" in str(result.exception)


def later(workload: Path, seconds: float) -> Path:
    """Write the same workload, each request so many seconds later."""
    path = workload.with_name("later.jsonl")
    requests = read_workload(workload)
    write_workload(path, [replace(each, arrival_s=each.arrival_s + seconds) for each in requests])
    return path


@pytest.mark.parametrize("seconds", [(), ("--seconds", "2")], ids=["whole", "cut"])
def test_times_may_count_from_any_moment(
    profile: Path, workload: Path, tmp_path: Path, seconds: tuple[str, ...]
) -> None:
    out = tmp_path / "out.json"
    args = ("--replicas", "2", "--routing", "auto", "--period", "1", "--json", str(out), *seconds)
    documents = []
    for path in (workload, later(workload, 1e6)):
        result = fleet("simulate", profile, path, *args)
        assert result.exit_code == 0, result.output
        documents.append(written(out))
    at_once, much_later = documents
    assert at_once["summary"]["num_requests"] > 0
    for part in ("figures", "summary", "timeline"):
        for name, value in at_once[part].items():
            assert much_later[part][name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
    for before, after in zip(at_once["replicas"], much_later["replicas"], strict=True):
        assert after == pytest.approx(before, rel=1e-4)


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


def test_a_run_has_the_first_request_however_soon_it_ends(
    profile: Path, workload: Path, tmp_path: Path
) -> None:
    args = ("--replicas", "2", "--routing", "random", "--slo-ttft", "1s", "--seconds", "0.001")
    result = fleet("simulate", profile, later(workload, 10.0), *args)
    assert result.exit_code == 0, result.output
    assert "0 of 1 request served (1 still ran or waited at the end)" in result.output
    assert "no request had ended by then, or was too late to be within 1 s to the first" in result.output
    result = fleet("compare", profile, workload, "--policies", "random", *args[:2], *args[4:], "--seeds", "2")
    assert result.exit_code == 0, result.output
    assert "when the run ended (requests): random+everywhere 1.0" in result.output


def test_requests_that_the_end_interrupts_in_time_are_left_out_of_the_share(
    profile: Path, workload: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    args = ("--replicas", "2", "--routing", "random", "--json", str(out), "--seconds", "2", "--slo-ttft")
    result = fleet("simulate", profile, workload, *args, "10s")
    found = written(out)
    undecided, unfinished = found["figures"]["num_undecided"], found["summary"]["num_unfinished"]
    assert undecided == unfinished > 0
    assert f" ({unfinished} still ran or waited at the end) in 2.0 simulated seconds" in result.output
    assert f"100.00% within 10 s to the first token, without {undecided} requests that" in result.output
    fleet("simulate", profile, workload, *args, "0.001ms")
    assert written(out)["figures"]["num_undecided"] == 0, "they are late already"
    assert written(out)["figures"]["attainment"] == 0.0


def test_plans_of_very_many_adapters_are_announced(profile: Path, workload: Path) -> None:
    args = ("--replicas", "2", "--adapters", "100000", "--seconds", "0.1")
    for placement, announced in (("contiguous", True), ("everywhere", False)):
        result = fleet("simulate", profile, workload, *args, "--routing", "random", "--placement", placement)
        assert result.exit_code == 0, result.output
        assert (", and plans for 100,000 adapters, each of which takes seconds" in result.output) == announced


def test_a_fleet_that_is_overloaded_ends_and_says_where(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "burst.jsonl"
    write_workload(path, random_workload(3, num_requests=300, num_adapters=9, rps=2000.0))
    args = ("--replicas", "2", "--routing", "first-fit", "--max-running", "4", "--kv-tokens", "1000")
    result = fleet("simulate", profile, path, *args)
    assert result.exit_code == 0, result.output
    assert "overloaded: it serves less than 90%" in result.output
    assert re.search(r"most wait at replica \d \([\d.]+ requests\)", result.output)


def test_policies_are_compared(profile: Path, workload: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    result = fleet(
        "compare", profile, workload, "--replicas", "2", "--policies", "most-idle,rank-aware+contiguous",
        "--seeds", "2", "--slo-tpt", "9ms", "--json", str(out), "--plot", str(plot),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = written(out)
    assert list(found["policies"]) == ["most-idle+everywhere", "rank-aware+contiguous"]
    assert found["slo_tpt_s"] == pytest.approx(0.009)
    assert found["slo_ttft_s"] is None
    half = found["policies"]["most-idle+everywhere"]["interval_95"]["tpot_mean_s"]
    assert f" ±{1e3 * half:.2f} " in result.output
    for figures in found["policies"].values():
        assert figures.keys() == {*FIGURES, "interval_95"}
        assert 0 <= figures["attainment"] <= 1
        assert figures["interval_95"]["tpt_mean_s"] > 0, "seeds differ"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["simulate", "compare", "capacity"])
def test_figures_are_written_with_what_they_were_computed_from(
    command: str, profile: Path, workload: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    policy = ("--routing", "random") if command == "simulate" else ("--policies", "random")
    seeds = ("--seeds", "1") if command == "compare" else ()
    args = ("--replicas", "2", *policy, *seeds, "--slo-ttft", "1s", "--link", "25GB/s", "--seconds", "2")
    result = fleet(command, profile, workload, *args, "--max-running", "8", "--json", str(out))
    assert result.exit_code == 0, result.output
    found = written(out)
    assert found["loraplex_version"] == __version__
    assert (found["profile"]["name"], found["profile"]["engine"]) == (str(profile), "loraplex")
    assert found["profile"]["sha256"] == hashlib.sha256(profile.read_bytes()).hexdigest()
    asked = found["workload"]
    assert asked["path"] == str(workload)
    assert asked["sha256"] == hashlib.sha256(workload.read_bytes()).hexdigest()
    assert (asked["num_requests"], asked["num_adapters"], asked["ranks"]) == (120, 9, [16])
    assert (found["num_replicas"], found["link_bytes_per_s"], found["seconds"]) == (2, 25e9, 2)
    assert (found["slo_ttft_s"], found["max_running"], found["adapter_bytes"]) == (1, 8, 8 << 20)
    if command != "simulate":
        assert found["num_seeds"] == 1


def test_a_profile_of_the_package_is_written_by_its_name(workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ("--replicas", "2", "--routing", "random", "--seconds", "1", "--json", str(out))
    assert fleet("simulate", Path("h200-llama-2-7b"), workload, *args).exit_code == 0
    found = written(out)["profile"]
    assert (found["name"], found["sha256"]) == ("h200-llama-2-7b", None)
    assert found["machine"].startswith("NVIDIA H200")


def test_many_policies_are_told_apart_in_a_picture() -> None:
    figures = PolicyFigures(
        attainment=0.0, num_undecided=0, ttft_p95_s=1.0, tpot_mean_s=1.0, tpt_mean_s=1.0, adapter_loads=1,
        busiest_over_mean=1.0, bytes_moved=None,
    )  # fmt: skip
    times_s = [0.01 * (1 + number) for number in range(101)]
    run = PolicyRun(figures, times_s, times_s, times_s, [])
    drawn = draw_policies({f"policy {row}": [run, run] for row in range(14)}, slo=Slo(), title="many")
    *distributions, attained = drawn.axes
    for axes in distributions:
        styles = {(line.get_color(), line.get_linestyle()) for line in axes.get_lines()}
        assert len(styles) == 14
        assert axes.get_ylabel() == "requests of seed 0 within it, %"
    low, high = attained.get_xlim()
    assert low > -0.1
    assert high > 0.5, "per cent, also if all are 0"
    drawn.draw_without_rendering()
    rows = [text.get_window_extent() for text in attained.texts]
    assert not any(one.overlaps(other) for one, other in pairwise(rows))


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


@pytest.mark.parametrize(
    ("args", "given"),
    [
        ((), ["slo_tpt_s"]),
        (("--slo-ttft", "2s"), ["slo_ttft_s"]),
        (("--slo-tpot", "1.5x"), ["slo_tpot_s"]),
        (("--slo-tpot", "8ms", "--slo-ttft", "2s"), ["slo_tpot_s", "slo_ttft_s"]),
        (("--slo-ttft", "2s", "--slo-tpt", "1.5x"), ["slo_tpt_s", "slo_ttft_s"]),
    ],
)
def test_limits_are_those_that_are_given_or_the_time_per_token(
    profile: Path, workload: Path, tmp_path: Path, args: tuple[str, ...], given: list[str]
) -> None:
    out = tmp_path / "out.json"
    args = ("--replicas", "2", "--routing", "random", "--json", str(out), *args)
    result = fleet("simulate", profile, workload, *args)
    found = written(out)
    assert [name for name in ("slo_tpt_s", "slo_tpot_s", "slo_ttft_s") if found[name] is not None] == given
    assert (" ms per token" in result.output) == (given != ["slo_ttft_s"])
    assert (" ms per token after the first" in result.output) == ("slo_tpot_s" in given)
    assert ("2 s to the first token" in result.output) == ("slo_ttft_s" in given)
    share = f"{found['figures']['attainment']:.2%} within "
    assert share in result.output


@pytest.mark.parametrize("policy", ["most-idle", "random+everywhere+migrate"])
@pytest.mark.parametrize("seconds", [(), ("--seconds", "1")])
def test_an_slo_that_no_rate_can_hold_is_refused(
    profile: Path, workload: Path, policy: str, seconds: tuple[str, ...]
) -> None:
    args = ("--replicas", "1", "--policies", policy, "--slo-tpt", "0.01ms", *seconds)
    result = fleet("capacity", profile, workload, *args)
    assert isinstance(result.exception, UserError), result.output
    assert "at no rate, however low, are 99.0% of requests within 0.01 ms per token" in str(result.exception)
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
    args = ("--replicas", "1", "--policies", "most-idle", "--seconds", "1", *limits)
    result = fleet("capacity", profile, workload, *args)
    assert isinstance(result.exception, UserError), result.output
    assert "0.1 ms to the first token; the most was" in str(result.exception)
    assert str(result.exception).endswith(advice)


def test_requests_migrate_if_they_may(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "hot.jsonl"
    requests = random_workload(3, num_requests=900, num_adapters=1, rps=90.0)
    write_workload(path, requests)
    args = ("--replicas", "2", "--routing", "first-fit", "--placement", "contiguous", "--max-running", "8")
    assert "of requests between replicas" not in fleet("simulate", profile, path, *args).output
    result = fleet("simulate", profile, path, *args, "--migrate")
    assert result.exit_code == 0, result.output
    assert "of requests between replicas" in result.output


def test_policies_are_listed() -> None:
    result = CliRunner().invoke(app, ["fleet", "policies"])
    lines = [line.split(maxsplit=1) for line in result.output.splitlines() if line.startswith("  ")]
    assert [name for name, _ in lines] == [*ROUTINGS, *PLACEMENTS], "each with a line of its own"
    assert all(len(line) < 100 for line in result.output.splitlines())


def test_a_simulation_without_a_routing_has_auto(profile: Path, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = fleet("simulate", profile, workload, "--replicas", "2", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert written(out)["policy"] == "auto"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--routing", "rank-awre"), "there is no routing 'rank-awre'; did you mean rank-aware"),
        (
            ("--routing", "random", "--placement", "somewhere"),
            "there is no placement 'somewhere'; did you mean",
        ),
        (("--routing", "zzz"), "there is no routing 'zzz'; there are random, round-robin"),
        (("--routing", "random", "--replicas", "0"), "must be at least 1 and at most 10,000, not 0"),
        (("--routing", "random", "--replicas", "1000000000"), "at most 10,000, not 1,000,000,000"),
        (("--routing", "random", "--link", "100kB/s"), "an adapter takes minutes; give 1MB/s or more"),
        (("--routing", "random", "--link", "25gb/s"), "is no speed; write it like 25GB/s, or 200Gb/s"),
        (("--routing", "random", "--period", "nan"), "must be 0.1 seconds or more, and not nan"),
        (("--routing", "random", "--slo-tpt", "fast"), "'fast' is no objective; write 1.5x"),
        (("--routing", "random", "--slo-tpt", "0x"), "'0x' is no objective"),
        (("--routing", "random", "--slo-tpot", "nan"), "--slo-tpot: 'nan' is no objective; write 1.5x"),
        *(
            (
                ("--routing", "random", "--slo-ttft", text),
                f"--slo-ttft: {text!r} is no objective; write 10s or",
            )
            for text in ("0", "0s", "-5s", "nan", "nans", "ten", "10", "")
        ),
        (
            ("--routing", "random", "--slo-ttft", "1.5x"),
            "--slo-ttft: '1.5x' is a multiple, which has no meaning here",
        ),
        (("--routing", "random", "--slo-ttft", "10s", "--slo-tpt", "0"), "--slo-tpt: '0' is no objective"),
        (("--routing", "random", "--period", "0"), "must be 0.1 seconds or more, and not 0"),
        (("--routing", "random", "--link", "0GB/s"), "nothing ever arrives at 0GB/s"),
        (("--routing", "random", "--link", "25GB"), "'25GB' is no speed; write it like 25GB/s"),
        (("--routing", "random", "--adapters", "3"), "there are 3, counted from 0"),
        (("--routing", "random", "--plot", "a.txt"), "a.txt is no .png"),
        (("--routing", "random", "--plot", "a.png", "--json", "a.png"), "a.png is also what --json names"),
        (("--routing", "random", "--kv-tokens", "16"), "KV memory holds 16 tokens, too few for a request"),
        (
            ("--routing", "random", "--slo-ttft", "1s", "--kv-tokens", "16", "--adapter-mib", "0.25"),
            "beside an adapter of 0.25 MiB, too few for a request",
        ),
        (("--routing", "contiguous"), "'contiguous' is a placement, and a routing is wanted here"),
        (("--costs", "liner"), "--costs: there is no form of costs 'liner'; did you mean linear?"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    profile: Path, workload: Path, args: tuple[str, ...], says: str
) -> None:
    replicas = () if "--replicas" in args else ("--replicas", "2")
    result = fleet("simulate", profile, workload, *replicas, *args)
    assert result.exit_code != 0
    said = result.output.replace("│", " ") + str(result.exception)
    assert says in " ".join(said.split())


@pytest.fixture
def slots(tmp_path: Path) -> Path:
    path = tmp_path / "slots.json"
    write_slot_profile(path, TRUTH)
    return path


def slot_fleet(command: str, profile: Path, workload: Path, *args: str) -> Result:
    files = ("--profile", str(profile), "--workload", str(workload), "--replicas", "2", "--slots", "3")
    return CliRunner().invoke(app, ["fleet", command, *files, *args])


def test_a_fleet_of_engines_with_slots_is_simulated(slots: Path, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = slot_fleet("simulate", slots, workload, "--routing", "auto", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "120 of 120 requests served" in result.output
    found = written(out)
    assert found["figures"].keys() == FIGURES
    assert found["figures"]["bytes_moved"] is None, "the profile does not say how large adapters are"
    assert found["figures"]["adapter_loads"] > 0
    args = ("--routing", "round-robin", "--link", "25GB/s", "--json", str(out))
    assert "give --adapter-mib, or leave --link out" in str(
        slot_fleet("simulate", slots, workload, *args).exception
    )
    result = slot_fleet("simulate", slots, workload, *args, "--adapter-mib", "80")
    assert "GB fetched" in result.output
    assert written(out)["figures"]["bytes_moved"] % (80 << 20) == 0


@pytest.mark.parametrize("command", ["compare", "capacity"])
def test_a_policy_that_slots_have_no_use_for_is_refused_before_anything_runs(
    command: str, slots: Path, workload: Path
) -> None:
    result = slot_fleet(command, slots, workload, "--policies", "random,affinity+burst-tolerance")
    assert "affinity+burst-tolerance: burst-tolerance is about memory" in str(result.exception)
    assert "random" not in result.output


def test_policies_of_engines_with_slots_are_compared(slots: Path, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ("--policies", "rank-aware,routing-table+loraserve", "--seeds", "1", "--json", str(out))
    result = slot_fleet("compare", slots, workload, *args)
    assert result.exit_code == 0, result.output
    assert list(written(out)["policies"]) == ["rank-aware+everywhere", "routing-table+loraserve"]


def test_capacity_of_engines_with_slots_is_found(slots: Path, workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    args = ("--policies", "most-idle", "--attainment", "0.9", "--slo-tpt", "100ms", "--json", str(out))
    result = slot_fleet("capacity", slots, workload, *args)
    assert result.exit_code == 0, result.output
    assert written(out)["capacity_rps"]["most-idle+everywhere"] > 0


def test_slots_are_refused_for_an_engine_without(profile: Path, workload: Path) -> None:
    result = fleet("simulate", profile, workload, "--replicas", "2", "--routing", "random", "--slots", "3")
    assert "the profile is of an engine without slots; leave --slots out" in str(result.exception)


def test_slots_are_hinted_at_where_they_are_left_to_the_default(slots: Path, workload: Path) -> None:
    files = ("--profile", str(slots), "--workload", str(workload), "--replicas", "2", "--routing", "random")
    result = CliRunner().invoke(app, ["fleet", "simulate", *files])
    assert "each replica has 9, one for each adapter, unless --slots says how many" in result.output
    assert "--slots" not in slot_fleet("simulate", slots, workload, "--routing", "random").output


@pytest.mark.parametrize("seeds", ["0", "99999999999"])
def test_seeds_are_bounded(profile: Path, workload: Path, seeds: str) -> None:
    args = ("--replicas", "2", "--policies", "random", "--seeds", seeds)
    result = fleet("compare", profile, workload, *args)
    assert result.exit_code == 2
    assert f"must be at least 1 and at most 1,000, not {int(seeds):,}" in " ".join(
        result.output.replace("│", " ").split()
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_figures_are_saved_before_they_are_printed(profile: Path, workload: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    command = (
        *(sys.executable, "-m", "loraplex.cli.main", "fleet", "simulate"),
        *("--profile", profile, "--workload", workload, "--replicas", "2", "--routing", "random"),
        *("--json", out, "--plot", plot),
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "the output cannot be written" in done.stderr
    assert written(out)["summary"]["num_served"] == 120
    assert plot.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_figures_are_printed_where_files_cannot_be_written(
    command: str, profile: Path, workload: Path, tmp_path: Path
) -> None:
    full, out = tmp_path / "full.png", tmp_path / "out.json"
    full.symlink_to("/dev/full")
    options, figures = {
        "simulate": (("--routing", "random"), "120 of 120 requests served"),
        "compare": (("--policies", "random", "--seeds", "1"), "\nrandom+everywhere "),
    }[command]
    files = ("--plot", str(full), "--json", str(out))
    result = fleet(command, profile, workload, "--replicas", "2", "--slo-tpt", "30ms", *options, *files)
    assert figures in result.output
    assert f"wrote {out}" in result.output, "one file does not depend on the other"
    assert written(out)
    assert isinstance(result.exception, StorageError)
    assert f"{full}: cannot be written (No space left on device)" in str(result.exception)


def test_a_picture_is_replaced_in_one_go(
    profile: Path, workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = tmp_path / "out.png"
    plot.write_bytes(b"the last one")

    def broken(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", broken)
    args = ("--replicas", "2", "--routing", "random", "--plot", str(plot))
    result = fleet("simulate", profile, workload, *args)
    assert f"{plot}: cannot be written (No space left on device)" in str(result.exception)
    assert plot.read_bytes() == b"the last one"
    assert not list(tmp_path.glob(".*")), "nothing is left behind"


def test_a_policy_that_is_named_twice_is_refused(profile: Path, workload: Path) -> None:
    args = ("--replicas", "2", "--policies", "random,random+everywhere")
    result = fleet("compare", profile, workload, *args)
    assert "is named twice; leave one of them out" in str(result.exception)
    result = fleet("compare", profile, workload, "--replicas", "2", "--policies", "random+random+random")
    assert "is no policy; write ROUTING+PLACEMENT" in str(result.exception)


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_policies_predict_by_the_costs_that_are_asked_for(
    command: str, profile: Path, workload: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    policy = ("--routing", "rank-aware") if command == "simulate" else ("--policies", "rank-aware")
    seeds = ("--seeds", "1") if command == "compare" else ()
    found = {}
    for costs in ("steps", "linear"):
        args = ("--replicas", "2", *policy, *seeds, "--slo-ttft", "1s", "--costs", costs, "--json", str(out))
        result = fleet(command, profile, workload, *args)
        assert result.exit_code == 0, result.output
        found[costs] = written(out)
        assert found[costs].pop("costs") == costs
        assert found[costs].pop("warm") is False
    assert found["steps"] != found["linear"]


def test_an_unknown_form_of_costs_is_refused_by_all_commands(profile: Path, workload: Path) -> None:
    for command in ("compare", "capacity"):
        args = ("--replicas", "2", "--policies", "rank-aware", "--costs", "table")
        error = fleet(command, profile, workload, *args).exception
        assert str(error) == "--costs: there is no form of costs 'table'; there are steps, linear"
