"""`loraplex twin batching`: batching policies side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from twin_commands import error_of, profile_in, twin, workload_in

from loraplex.core.batching import Batching, DelayBound
from loraplex.perf.named_profiles import find_profile
from loraplex.twin.replay import ReplayOptions, replay
from loraplex.workload.jsonl import WorkloadRequest, read_workload, write_workload

PROFILE = Path("h200-llama-2-7b")


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Return a workload that nearly all is for one adapter."""
    path = tmp_path / "workload.jsonl"
    requests = [
        WorkloadRequest(
            arrival_s=0.0, prompt_tokens=64 + number, output_tokens=40, adapter=int(number % 8 == 7)
        )
        for number in range(48)
    ]
    write_workload(path, requests)
    return path


def test_all_policies_are_compared_in_one_table(workload: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = twin("batching", PROFILE, workload, "--ranks", "128", "--modules", "all", "--json", str(out))
    assert result.exit_code == 0, result.output
    saved = json.loads(out.read_text())
    found, beyond_s = saved["policies"], saved["beyond_bound_s"]
    assert list(found) == list(Batching)
    assert list(beyond_s) == [each for each in Batching if each is not Batching.FCFS]
    rows = {line.split()[0]: line.split() for line in result.output.splitlines() if line}
    for name, summary in found.items():
        cells = rows[name][1:]
        assert cells[0] == f"{summary['output_tok_s']:,.0f}"
        assert cells[1:3] == [f"{summary['ttft_s'][key] * 1e3:,.1f}" for key in ("mean", "p95")]
        assert cells[3] == (f"{beyond_s[name] * 1e3:+,.0f}" if name in beyond_s else "-")
        assert cells[4] == f"{summary['tpt_s']['mean'] * 1e3:,.2f}"
        assert cells[5] == f"{summary['e2e_s']['mean'] * 1e3:,.1f}"
        assert cells[6] == f"{summary['num_merged_steps'] / summary['num_steps']:.0%}"
    assert found["fcfs"]["num_merged_steps"] == 0 < found["merged"]["num_merged_steps"]


def test_a_policy_has_the_figures_of_a_run_with_it(workload: Path, tmp_path: Path) -> None:
    out, alone = tmp_path / "out.json", tmp_path / "alone.json"
    options = ("--max-running", "8", "--max-delay-by-grouping", "50%")
    chosen = ("--policies", "fcfs, auto")
    assert twin("batching", PROFILE, workload, *options, *chosen, "--json", str(out)).exit_code == 0
    run = twin("run", PROFILE, workload, *options, "--batching", "auto", "--json", str(alone))
    assert run.exit_code == 0
    found = json.loads(out.read_text())
    assert list(found["policies"]) == ["fcfs", "auto"]
    assert found["policies"]["auto"] == json.loads(alone.read_text())["summary"]
    assert found["max_delay"] == {"share": 0.5, "seconds": 0.0}


def test_the_worst_first_token_is_compared_with_first_come_first_served(
    workload: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    for policies, bound, expected_s in (
        ("fcfs,merged", DelayBound(), True),
        ("grouped,fcfs", DelayBound(share=0.5, seconds=0.0), True),
        ("grouped,auto", DelayBound(), False),
    ):
        options = ("--policies", policies, "--max-running", "8", "--json", str(out))
        if bound != DelayBound():
            options = (*options, "--max-delay-by-grouping", "50%")
        assert twin("batching", PROFILE, workload, *options).exit_code == 0
        found = json.loads(out.read_text())["beyond_bound_s"]
        assert bool(found) == expected_s
        for policy, beyond_s in found.items():
            runs = [
                replay(
                    find_profile(PROFILE),
                    list(read_workload(workload)),
                    ReplayOptions(num_adapters=2, max_running=8, batching=each, max_delay=max_delay),
                ).requests
                for each, max_delay in ((Batching(policy), bound), (Batching.FCFS, DelayBound()))
            ]
            pairs = [(one.ttft_s, other.ttft_s) for one, other in zip(*runs, strict=True)]
            assert beyond_s == max(ttft_s - fcfs_s - bound.allowed_s(fcfs_s) for ttft_s, fcfs_s in pairs)  # type: ignore[arg-type, operator]


def test_a_run_says_how_far_it_is_after_the_last_arrival(workload: Path) -> None:
    requests = list(read_workload(workload))
    shares: list[float] = []
    outcome = replay(
        find_profile(PROFILE), requests, ReplayOptions(num_adapters=2, max_running=8), shares.append
    )
    assert len(outcome.requests) == len(requests)
    assert shares == sorted(set(shares))
    assert len(shares) >= 5, "they all arrive at once, and end eight at a time"
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--policies", "fcfs,autp"), "no batching policy 'autp'; did you mean auto?"),
        (("--policies", "fcfs,,auto"), "there is no batching policy ''; there are fcfs,"),
        (("--policies", "auto,auto"), "auto is named twice; leave one of them out"),
        (("--policies", "fcfs,merged", "--max-delay-by-grouping", "5%"), "the bound is for batching by"),
    ],
)  # fmt: skip
def test_policies_that_cannot_be_compared_are_refused(
    options: tuple[str, ...], words: str, workload: Path
) -> None:
    result = twin("batching", PROFILE, workload, *options)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("fcfs,auto", "compare them on a workload with `loraplex twin batching --policies fcfs,auto`"),
        ("fcfs, auto", "`loraplex twin batching --policies fcfs,auto`"),
        ("autp", "there is no batching policy 'autp'; did you mean auto?"),
    ],
)
def test_a_run_takes_one_policy_and_names_what_compares_several(
    given: str, words: str, workload: Path
) -> None:
    result = twin("run", PROFILE, workload, "--batching", given)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


def test_an_engine_with_slots_has_no_policies(tmp_path: Path) -> None:
    result = twin("batching", profile_in(tmp_path, "slots"), workload_in(tmp_path))
    assert "give a profile of our own engine" in error_of(result)
