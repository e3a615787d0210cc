"""Commands that take a profile by its name: no GPU, and no file of one's own, is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from twins import imagined_machine
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.errors import LoraplexError
from loraplex.perf.named_profiles import named_profiles
from loraplex.perf.profile_json import write_profile
from loraplex.workload.jsonl import WorkloadRequest, write_workload

NAMES = list(named_profiles())


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.jsonl"
    requests = [
        WorkloadRequest(arrival_s=0.1 * number, adapter=number % 4, prompt_tokens=50, output_tokens=20)
        for number in range(20)
    ]
    write_workload(path, requests)
    return path


def invoke(*args: str | Path) -> str:
    result = CliRunner().invoke(app, [str(each) for each in args])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", NAMES)
def test_every_named_profile_serves_a_workload_in_the_twin(name: str, workload: Path) -> None:
    said = invoke("twin", "run", "--profile", name, "--workload", workload, "--ranks", "8,64")
    assert "20 of 20 requests served" in said


def test_a_fleet_is_simulated_by_a_profile_of_a_name(workload: Path) -> None:
    policy = ("--replicas", "2", "--routing", "rank-aware", "--ranks", "8,64")
    said = invoke("fleet", "simulate", "--profile", "h200-llama-2-7b-padded", "--workload", workload, *policy)
    assert "20 of 20 requests served" in said


def test_a_name_that_is_unknown_is_refused_with_those_near_it(workload: Path) -> None:
    for command in (("twin", "run"), ("fleet", "simulate", "--replicas", "2", "--routing", "random")):
        args = [*command, "--profile", "h200-llama2-7b", "--workload", str(workload)]
        result = CliRunner().invoke(app, args)
        assert isinstance(result.exception, LoraplexError), result.output
        assert "did you mean h200-llama-2-7b or" in str(result.exception)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "H200-LLAMA-2-7B",
            "there is no file or named profile 'H200-LLAMA-2-7B'; did you mean h200-llama-2-7b?",
        ),
        ("", "what is given is nothing, or this folder; name a file of `loraplex profile`, or one of"),
        ("..", "what is given is .., a folder; name a file of `loraplex profile`, or one of"),
    ],
)
def test_what_is_no_profile_is_refused_with_what_to_give(workload: Path, name: str, says: str) -> None:
    for command in (("twin", "run", "--workload", str(workload), "--profile"), ("profile", "show")):
        error = CliRunner().invoke(app, [*command, name]).exception
        assert isinstance(error, LoraplexError)
        assert says in str(error)


def test_the_list_has_a_line_for_each_name() -> None:
    heading, *lines = invoke("profile", "list").splitlines()
    assert heading.split()[:2] == ["name", "engine"]
    assert [line.split()[0] for line in lines] == NAMES
    assert all("%" in line or "do not pad" in line for line in lines)
    models = {name: re.split(r" {2,}", line)[3] for name, line in zip(NAMES, lines, strict=True)}
    assert models["h200-llama-2-7b"] == models["h200-llama-2-7b-padded"] == "llama-32x4096-mlp11008"
    assert models["h200-llama-3-8b"] == "llama-32x4096-mlp14336", "told apart, though as deep and wide"


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_shown_by_its_name(name: str) -> None:
    said = invoke("profile", "show", name)
    assert said.startswith(name)
    for words in ("mean error", "tok/s", "KV memory", "from host memory", "A decode step, ms"):
        assert words in said


def test_profiles_are_there_for_machines_too() -> None:
    listed = json.loads(invoke("profile", "list", "--json"))
    assert [each["name"] for each in listed] == NAMES
    shown = json.loads(invoke("profile", "show", NAMES[0], "--json"))
    assert listed[0].items() <= shown.items()
    assert 0 < shown["mean_error"]["decode"] < 1
    assert shown["decodes"][0]["num_requests"] == 1
    assert shown["kv_tokens"] > 0


def test_a_profile_is_shown_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "[red]mine.json"
    write_profile(path, imagined_machine())
    said = invoke("profile", "show", path)
    assert said.startswith("[red]mine.json\n")
    assert imagined_machine().subject.machine in said
