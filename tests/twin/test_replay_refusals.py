"""Profiles, workloads and options that `loraplex twin run` takes, and those that it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from twin_commands import ENGINES, error_of, profile_in, twin, workload_in
from twins import imagined_machine, random_workload

from loraplex.core.errors import CapacityError
from loraplex.core.modules import MODULES
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.held_out import HeldOut
from loraplex.perf.least_squares import FitQuality
from loraplex.perf.profile_json import write_profile
from loraplex.twin.replay import OwnEngines, ReplayOptions, longest_of
from loraplex.workload.jsonl import read_workload, write_workload


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    return workload_in(tmp_path)


@pytest.fixture(params=ENGINES)
def profile(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return profile_in(tmp_path, request.param)


def test_options_without_effect_are_refused(workload: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(profile, imagined_machine())
    assert "leave --slots out" in error_of(twin("run", profile, workload, "--slots", "4"))


@pytest.mark.parametrize(
    ("engine", "options", "advice"),
    [
        ("slots", ("--cpu-workers", "2"), "leave --cpu-workers out"),
        ("slots", ("--max-copy-gb-per-s", "6"), "leave --max-copy-gb-per-s out"),
        ("slots", ("--cold-start", "auto"), "leave --cold-start out"),
        ("slots", ("--batching", "auto"), "leave --batching out"),
        ("cuda", ("--batching", "auto"), "does not say how large merged weights are"),
        ("cpu", ("--cpu-workers", "2"), "leave --cpu-workers and --max-copy-gb-per-s out"),
        ("cpu", ("--max-copy-gb-per-s", "6"), "leave --cpu-workers and --max-copy-gb-per-s out"),
        ("cpu", ("--cold-start", "pipelined"), "choose --cold-start overlap"),
        ("cuda", ("--cold-start", "overlap", "--cpu-workers", "2"), "cpu-assist or auto"),
    ],
)
def test_ways_to_start_that_the_engine_does_not_have_are_refused(
    workload: Path, tmp_path: Path, engine: str, options: tuple[str, ...], advice: str
) -> None:
    profile = tmp_path / "profile.json"
    if engine == "slots":
        profile = profile_in(tmp_path, "slots")
    else:
        machine = imagined_machine()
        write_profile(profile, replace(machine, subject=replace(machine.subject, device=engine)))
    assert advice in error_of(twin("run", profile, workload, *options))


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_a_bus_without_a_rate_is_refused(profile: Path, workload: Path, rate: str) -> None:
    result = twin("run", profile, workload, "--max-copy-gb-per-s", rate)
    assert result.exit_code == 2
    assert "Invalid value for --max-copy-gb-per-s: must be more than 0" in result.output


def test_an_unknown_adapter_is_refused(profile: Path, workload: Path) -> None:
    message = error_of(twin("run", profile, workload, "--adapters", "3"))
    assert message.startswith("request ")
    assert "there are 3, counted from 0" in message


def test_a_memory_too_small_for_one_request_is_refused(profile: Path, workload: Path) -> None:
    assert "too few for a request of" in error_of(twin("run", profile, workload, "--kv-tokens", "64"))


@pytest.mark.parametrize("shared", [True, False])
def test_memory_and_the_sizes_of_adapters_are_the_profiles(
    shared: bool, workload: Path, tmp_path: Path
) -> None:
    """One token of KV cache a kilobyte, one rank of one module a kilobyte: what fits follows from it."""
    memory = EngineMemory(
        max_context=1 << 17,
        token_bytes=1 << 10,
        block_tokens=16,
        arena_bytes=256 << 10 if shared else None,
        kv_tokens=None if shared else 256,
        host_bytes=1 << 20,
        table_bytes=0,
        rank_bytes=dict.fromkeys(MODULES, 1 << 10),
    )
    profile = tmp_path / "profile.json"
    write_profile(profile, replace(imagined_machine(), memory=memory))
    longest = longest_of(read_workload(workload))
    small = twin("run", profile, workload, "--ranks", "1", "--kv-tokens", str(longest + 64))
    assert small.exit_code == 0, small.output
    too_little = error_of(twin("run", profile, workload, "--ranks", "1", "--kv-tokens", "64"))
    assert "KV memory holds" in too_little
    assert "too few for a request of" in too_little
    write_profile(profile, replace(imagined_machine(), memory=replace(memory, max_context=longest - 1)))
    too_long = error_of(twin("run", profile, workload, "--ranks", "1", "--kv-tokens", str(longest + 64)))
    assert f"context holds {longest - 1} tokens, too few for a request of {longest}" in too_long
    # An adapter of rank 16 on all modules takes 112 kilobytes; beside one, 144 tokens are left of 256.
    OwnEngines(
        replace(imagined_machine(), memory=memory),
        ReplayOptions(num_adapters=1, ranks=(16,), modules=MODULES),
        longest=144,
    )
    with pytest.raises(CapacityError, match="holds 144 tokens" if shared else "holds 256 tokens"):
        OwnEngines(
            replace(imagined_machine(), memory=memory),
            ReplayOptions(num_adapters=1, ranks=(16,), modules=MODULES),
            longest=257,
        )


def test_adapters_are_as_large_as_they_are_said_to_be() -> None:
    def sizes(**options: Any) -> list[int]:
        chosen = ReplayOptions(num_adapters=3, ranks=(8, 64), **options)
        return list(OwnEngines(imagined_machine(), chosen, longest=10).adapter_bytes.values())

    rank_bytes = 512 << 10
    assert sizes() == [24 * rank_bytes, 192 * rank_bytes, 24 * rank_bytes], "on q, k and v"
    assert sizes(modules=("q_proj",)) == [8 * rank_bytes, 64 * rank_bytes, 8 * rank_bytes]
    assert sizes(rank_bytes=1000) == [8000, 64000, 8000]
    assert sizes(adapter_bytes=1000) == [1000] * 3


def test_a_profile_that_says_nothing_of_memory_is_refused(workload: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(profile, replace(imagined_machine(), memory=None))
    assert "has no 'memory'" in error_of(twin("run", profile, workload))


@pytest.mark.parametrize("size", ["inf", "nan", "0", "-1"])
def test_sizes_that_are_none_are_refused(size: str, profile: Path, workload: Path) -> None:
    result = twin("run", profile, workload, "--adapter-mib", size)
    assert result.exit_code == 2
    assert "must be more than 0" in result.output


def test_an_adapter_that_does_not_fit_is_refused(workload: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(profile, imagined_machine())
    message = error_of(twin("run", profile, workload, "--adapter-mib", "1000000"))
    assert "KV memory holds 0 tokens beside an adapter of 1000000 MiB" in message


@pytest.mark.parametrize("profile", ["ours"], indirect=True)
def test_modules_are_named_as_elsewhere(profile: Path, workload: Path) -> None:
    assert twin("run", profile, workload, "--modules", "all").exit_code == 0
    assert "unknown module 'w'" in error_of(twin("run", profile, workload, "--modules", "q,w"))


@pytest.mark.parametrize("profile", ["slots"], indirect=True)
@pytest.mark.parametrize(
    "option",
    [("--modules", "all"), ("--max-running", "8"), ("--adapter-mib", "25")],
    ids=lambda option: option[0],
)
def test_options_that_slots_do_not_have_are_refused(
    option: tuple[str, str], profile: Path, workload: Path
) -> None:
    message = error_of(twin("run", profile, workload, *option))
    assert message == (f"the profile is of an engine with slots, which it says all of; leave {option[0]} out")


def test_an_adapter_far_beyond_the_others_is_asked_about(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "far.jsonl"
    write_workload(path, [replace(random_workload(1, num_requests=1)[0], adapter=10**9)])
    assert "so there would be 1,000,000,001; give --adapters" in error_of(twin("run", profile, path))


def test_a_poor_profile_is_warned_of_in_one_line(workload: Path, tmp_path: Path) -> None:
    path = tmp_path / "poor.json"

    def warnings(r_squared: float) -> list[str]:
        poor = FitQuality(num_samples=9, r_squared=r_squared, mean_error=0.46, worst_error=1.0)
        held_out = HeldOut(decode=poor, prefill=poor, serving=None, load=poor)
        write_profile(path, replace(imagined_machine(), held_out=held_out))
        return list(twin("run", path, workload).stderr.splitlines())

    [off] = warnings(0.9)
    assert "off by 46% on the mean" in off
    [poor] = warnings(0.2)
    assert poor.startswith("warning: R² of held out: decode, held out: prefill, held out: load is under 0.5")
    assert "the twin is no better than poor.json" in poor
    write_profile(path, imagined_machine())
    assert twin("run", path, workload).stderr == ""


def test_a_profile_of_another_model_is_refused(profile: Path, workload: Path) -> None:
    assert "not 'llama'" in error_of(twin("run", profile, workload, "--model", "llama"))


def test_a_profile_with_a_part_missing_is_refused(profile: Path, workload: Path) -> None:
    document = json.loads(profile.read_text())
    part = "memory" if "memory" in document else "disk"
    del document[part]
    profile.write_text(json.dumps(document))
    assert f"has no '{part}'" in error_of(twin("run", profile, workload))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"arrival_s": 0.0, "prompt_tokens": 1, "output_tokens": 1, "adapter": 0}', ":51: arrival_s 0.0 is"),
        ('{"arrival_s": 1e6, "prompt_tokens": -1, "output_tokens": 1, "adapter": 0}', ":51: prompt_tokens"),
    ],
)
def test_a_bad_line_of_a_workload_is_refused(profile: Path, workload: Path, line: str, says: str) -> None:
    with workload.open("a") as file:
        file.write(line + "\n")
    assert says in error_of(twin("run", profile, workload))


@pytest.mark.parametrize(
    ("size", "words"), [("99999999TiB", "more than any host has"), ("1KiB", "hold no block of the KV cache")]
)
def test_swap_memory_that_cannot_be_is_refused(size: str, words: str, workload: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    write_profile(profile, imagined_machine())
    assert words in error_of(twin("run", profile, workload, "--kv-swap-memory", size))
