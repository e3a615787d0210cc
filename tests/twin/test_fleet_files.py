"""The files of `loraplex fleet`: figures with what they were computed from, and pictures."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from fleet_commands import fleet, written

from loraplex import __version__
from loraplex.cli.fleet_plot import draw_policies
from loraplex.core.errors import StorageError
from loraplex.twin.fleet_compare import PolicyRun
from loraplex.twin.fleet_figures import PolicyFigures
from loraplex.twin.slo import Slo


@pytest.mark.parametrize("command", ["simulate", "compare", pytest.param("capacity", marks=pytest.mark.slow)])
def test_figures_are_written_with_what_they_were_computed_from(
    command: str, profile: Path, workload: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    policy = ("--routing", "random") if command == "simulate" else ("--policies", "random")
    more = {"compare": ("--seeds", "1"), "capacity": ("--attainment", "0.9")}.get(command, ())
    args = ("--replicas", "2", *policy, *more, "--slo-ttft", "1s", "--link", "25GB/s", "--seconds", "2")
    result = fleet(
        command, profile, workload, *args, "--max-running", "8", "--ranks", "8,32", "--json", str(out)
    )
    assert result.exit_code == 0, result.output
    found = written(out)
    assert found["loraplex_version"] == __version__
    assert (found["profile"]["name"], found["profile"]["engine"]) == (str(profile), "loraplex")
    assert found["profile"]["sha256"] == hashlib.sha256(profile.read_bytes()).hexdigest()
    asked = found["workload"]
    assert asked["path"] == str(workload)
    assert asked["sha256"] == hashlib.sha256(workload.read_bytes()).hexdigest()
    assert (asked["num_requests"], asked["num_adapters"]) == (120, 9)
    assert asked["adapters_by_rank"] == {"8": 5, "32": 4}
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
