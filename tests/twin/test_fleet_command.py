"""`loraplex fleet simulate` and `compare`: what they print and refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fleet_commands import FIGURES, fleet, later, written
from twins import random_workload
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.cli.slo import parse_slo
from loraplex.fleet.policy import PLACEMENTS, ROUTINGS
from loraplex.twin.fleet_run import BaseTimes
from loraplex.workload.jsonl import WorkloadRequest, write_workload


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


@pytest.mark.parametrize("seconds", [(), ("--seconds", "2000ms")], ids=["whole", "cut"])
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


@pytest.mark.parametrize(
    ("text", "limit_s"),
    [("30ms", 0.03), (".5s", 0.5), ("30", 30.0), ("1m", 60.0), ("1.5x", 0.15), (" .5 x", 0.05)],
)
def test_a_limit_per_token_is_any_duration_or_a_multiple(text: str, limit_s: float) -> None:
    slo = parse_slo(text, text, None).slo(lambda: BaseTimes(0.1, 0.1))
    assert (slo.tpt_s, slo.tpot_s) == (pytest.approx(limit_s), pytest.approx(limit_s))


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


def test_requests_migrate_if_they_may(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "hot.jsonl"
    requests = random_workload(3, num_requests=900, num_adapters=1, rps=90.0)
    write_workload(path, requests)
    args = ("--replicas", "2", "--routing", "first-fit", "--placement", "contiguous", "--max-running", "8")
    assert "of requests between replicas" not in fleet("simulate", profile, path, *args).output
    result = fleet("simulate", profile, path, *args, "--migrate")
    assert result.exit_code == 0, result.output
    assert "of requests between replicas" in result.output


def burst_on_one_adapter(folder: Path) -> Path:
    path = folder / "burst.jsonl"
    requests = [
        WorkloadRequest(arrival_s=0.0, prompt_tokens=64, output_tokens=40, adapter=each % 2)
        for each in range(48)
    ]
    write_workload(path, requests)
    return path


def test_replicas_batch_by_the_policy_that_is_asked_for(tmp_path: Path) -> None:
    workload, out = burst_on_one_adapter(tmp_path), tmp_path / "out.json"
    merged = {}
    for batching in ("fcfs", "merged"):
        result = fleet(
            "simulate", Path("h200-llama-2-7b"), workload, "--replicas", "2", "--routing", "affinity",
            "--batching", batching, "--json", str(out),
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert ("% of steps merged" in result.output) == (batching == "merged")
        assert written(out)["batching"] == batching
        merged[batching] = written(out)["summary"]
    assert merged["fcfs"]["num_merged_steps"] == 0
    assert merged["merged"]["num_merged_steps"] > 0.9 * merged["merged"]["num_steps"]
    assert merged["merged"]["duration_s"] != merged["fcfs"]["duration_s"]


def test_policies_are_compared_and_limits_found_with_a_batching_policy(tmp_path: Path) -> None:
    workload, out = burst_on_one_adapter(tmp_path), tmp_path / "out.json"
    args = ("--replicas", "2", "--policies", "affinity", "--seeds", "1", "--json", str(out))
    means = []
    for batching in ((), ("--batching", "auto", "--max-delay-by-grouping", "50%"), ("--batching", "merged")):
        result = fleet("compare", Path("h200-llama-2-7b"), workload, *args, *batching)
        assert result.exit_code == 0, result.output
        [figures] = written(out)["policies"].values()
        means.append(figures["tpt_mean_s"])
        if "auto" in batching:
            assert written(out)["max_delay"] == {"share": 0.5, "seconds": 0.0}
    assert means[0] != means[2]
    refused = fleet("capacity", Path("h200-llama-2-7b"), workload, *args[:4], "--max-delay-by-grouping", "5%")
    assert refused.exit_code == 2
    assert "the bound is for batching by grouped or auto" in " ".join(
        refused.output.replace("│", " ").split()
    )


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
        (("--routing", "random", "--period", "nan"), "'nan' is no time; write it like 2s or 500ms"),
        (("--routing", "random", "--slo-tpt", "fast"), "'fast' is no objective; write 1.5x"),
        (("--routing", "random", "--slo-tpt", "0x"), "'0x' is no objective"),
        (("--routing", "random", "--slo-tpot", "nan"), "--slo-tpot: 'nan' is no objective; write 1.5x"),
        *(
            (
                ("--routing", "random", "--slo-ttft", text),
                f"--slo-ttft: {text!r} is no time{bound}; write it like 2s or",
            )
            for bound, texts in ((" above 0s", ("0", "0s")), ("", ("-5s", "nan", "nans", "ten", "")))
            for text in texts
        ),
        (
            ("--routing", "random", "--slo-ttft", "1.5x"),
            "--slo-ttft: '1.5x' is no time; write it like 2s or 500ms",
        ),
        (("--routing", "random", "--slo-ttft", "10s", "--slo-tpt", "0"), "--slo-tpt: '0' is no objective"),
        (("--routing", "random", "--period", "0"), "'0' is no time at least 100ms"),
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


@pytest.mark.parametrize("seeds", ["0", "99999999999"])
def test_seeds_are_bounded(profile: Path, workload: Path, seeds: str) -> None:
    args = ("--replicas", "2", "--policies", "random", "--seeds", seeds)
    result = fleet("compare", profile, workload, *args)
    assert result.exit_code == 2
    assert f"must be at least 1 and at most 1,000, not {int(seeds):,}" in " ".join(
        result.output.replace("│", " ").split()
    )


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
