"""`loraplex twin` as tests call it."""

from __future__ import annotations

from pathlib import Path

from click.testing import Result
from recorded import TRUTH
from twins import imagined_machine, random_workload
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.errors import LoraplexError
from loraplex.perf.profile_json import write_profile
from loraplex.perf.slot_profile import write_slot_profile
from loraplex.workload.jsonl import write_workload

ENGINES = ("slots", "ours")


def workload_in(folder: Path) -> Path:
    path = folder / "workload.jsonl"
    write_workload(path, random_workload(1, num_requests=50, rps=5.0))
    return path


def profile_in(folder: Path, engine: str) -> Path:
    """Write the profile of one of ENGINES."""
    path = folder / "profile.json"
    if engine == "slots":
        write_slot_profile(path, TRUTH)
    else:
        write_profile(path, imagined_machine())
    return path


def twin(command: str, profile: Path, workload: Path, *args: str) -> Result:
    return CliRunner().invoke(
        app, ["twin", command, "--profile", str(profile), "--workload", str(workload), *args]
    )


def error_of(result: Result) -> str:
    assert isinstance(result.exception, LoraplexError), result.output
    return str(result.exception)
