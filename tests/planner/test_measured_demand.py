"""The demand that a running server has measured, asked for by `loraplex plan make --from`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from canned_server import answering, demand_of
from small import PROFILE_NAME, own_on_cpu
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.cli.measured_demand import measured_demand
from loraplex.cli.plan_demand import asked_demand
from loraplex.core.errors import UserError
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.planner.demand import AdapterDemand, PlanError
from loraplex.planner.plan import whole_adapters
from loraplex.planner.plan_file import read_plan

PATH = "/v1/demand"


def test_rates_and_lengths_are_those_that_were_measured(capsys: pytest.CaptureFixture[str]) -> None:
    answer = demand_of({"a": 0.5, "idle": 0.0}) | {"base_requests": 500}
    with answering({PATH: (200, answer)}) as url:
        found = measured_demand(url, None).demand
    assert found.adapters == (
        AdapterDemand(name="a", rank=8, rate_rps=0.5),
        AdapterDemand(name="idle", rank=8, rate_rps=0.0),
    )
    assert (found.prompt_tokens, found.output_tokens) == (200.0, 30.0)
    assert "50% of the requests are for the base model alone" in capsys.readouterr().err


def test_a_plan_is_made_from_it(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    with answering({PATH: (200, demand_of({"a": 0.5, "idle": 0.0}))}) as url:
        args = ["plan", "make", "--from", url, "--profile", PROFILE_NAME, "--out", str(out), "--no-compare"]
        made = CliRunner().invoke(app, args)
    assert made.exit_code == 0, made
    assert {each.name: each.rate_rps for each in whole_adapters(read_plan(out).gpus)} == {
        "a": 0.5,
        "idle": 0.0,
    }


OWN = "h200-llama-2-7b"


def test_adapters_that_the_engines_do_not_take_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    answer = demand_of({"a": 0.5, "huge": 0.1, "giant": 0.1})
    for row in answer["data"][1:]:
        row["rank"] = 1024
    with answering({PATH: (200, answer)}) as url:
        found = measured_demand(url, None, find_profile(Path(OWN))).demand
        assert [each.name for each in found.adapters] == ["a"]
        said = capsys.readouterr().err
        assert "adapter 'huge' has rank 1,024, and engines serve ranks up to 512 on a GPU" in said
        assert "it is left out of the plan, with 1 more of such ranks; serve such adapters apart" in said
        found = measured_demand(url, None, own_on_cpu()).demand
        assert [each.name for each in found.adapters] == ["a", "huge", "giant"]
        assert capsys.readouterr().err == ""
        del answer["data"][0]
        with pytest.raises(PlanError, match="adapter 'huge' has rank 1,024"):
            measured_demand(url, None, find_profile(Path(OWN)))


@pytest.mark.parametrize(
    ("profile", "change", "words"),
    [
        (OWN, {}, None),
        (OWN, {"machine": "4 cores of Z80", "dtype": "float32"}, "instead of '4 cores of Z80'"),
        (PROFILE_NAME, {}, "an engine with slots for 'llama-3.1-8b-instruct' instead of loraplex's own"),
    ],
)
def test_a_profile_of_other_engines_is_pointed_out(
    profile: str, change: dict[str, str], words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find_profile(Path(OWN))
    assert isinstance(found, CostModel)
    engine = asdict(found.subject) | change
    with answering({PATH: (200, demand_of({"a": 0.5}) | {"engine": engine})}) as url:
        asked_demand(None, None, None, None, from_url=url, profile=find_profile(Path(profile)))
    said = capsys.readouterr().err
    if words is None:
        assert said == ""
        return
    assert f"the profile is not of the engines of {url}" in said
    assert words in said
    assert ("measure one there" if change else f"plan with --profile {OWN}") in said


def test_few_requests_are_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({PATH: (200, demand_of({"a": 0.5}, seconds=10.0))}) as url:
        measured_demand(url, None)
    assert "5 requests for adapters within 10 s: the rates are rough" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((401, {"error": {"message": "no valid API key"}}), "wants an API key"),
        ((404, {}), "is it a loraplex server with a measured demand"),
        ((200, "<html>"), "did not answer with JSON"),
        ((200, {"data": {}}), "something else than a list"),
        ((200, {"data": [{"id": "gpt"}]}), "did not answer as a server of this version"),
        ((200, demand_of({})), "serves no adapters"),
        ((200, demand_of({"a": 0.0}) | {"prompt_tokens": None}), "no request for an adapter within the last"),
        ((200, demand_of({"a": 1.0}) | {"output_tokens": None}), "send it traffic first"),
    ],
)
def test_what_is_no_measured_demand_is_said(answer: tuple[int, Any], words: str) -> None:
    with answering({PATH: answer}) as url, pytest.raises(UserError, match=words):
        measured_demand(url, "key")


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"no server answers at http://127.0.0.1:9"):
        measured_demand("http://127.0.0.1:9", None)
