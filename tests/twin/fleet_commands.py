"""`loraplex fleet` as tests call it, and the files that it is given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from click.testing import Result
from recorded import TRUTH
from twins import imagined_machine, random_workload
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.perf.profile_json import write_profile
from loraplex.perf.slot_profile import write_slot_profile
from loraplex.workload.jsonl import read_workload, write_workload

FIGURES = {
    "attainment", "num_undecided", "ttft_p95_s", "tpot_mean_s", "tpt_mean_s", "adapter_loads",
    "busiest_over_mean", "bytes_moved",
}  # fmt: skip


def profile_in(folder: Path) -> Path:
    path = folder / "profile.json"
    write_profile(path, imagined_machine())
    return path


def slot_profile_in(folder: Path) -> Path:
    path = folder / "slots.json"
    write_slot_profile(path, TRUTH)
    return path


def workload_in(folder: Path) -> Path:
    path = folder / "workload.jsonl"
    write_workload(path, random_workload(3, num_requests=120, num_adapters=9, rps=40.0))
    return path


def later(workload: Path, seconds: float) -> Path:
    """Write the same workload, each request so many seconds later."""
    path = workload.with_name("later.jsonl")
    requests = read_workload(workload)
    write_workload(path, [replace(each, arrival_s=each.arrival_s + seconds) for each in requests])
    return path


def fleet(command: str, profile: Path, workload: Path, *args: str) -> Result:
    files = ("--profile", str(profile), "--workload", str(workload), "--adapter-mib", "8")
    return CliRunner().invoke(app, ["fleet", command, *files, *args])


def slot_fleet(command: str, profile: Path, workload: Path, *args: str) -> Result:
    files = ("--profile", str(profile), "--workload", str(workload), "--replicas", "2", "--slots", "3")
    return CliRunner().invoke(app, ["fleet", command, *files, *args])


def written(path: Path) -> Any:
    return json.loads(path.read_text())
