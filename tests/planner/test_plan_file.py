"""Plans written to files and read again; broken ones are refused in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.core.errors import StorageError
from loraplex.planner.demand import AdapterDemand, PlanError
from loraplex.planner.objectives import Objective
from loraplex.planner.plan import GpuPlan, Plan
from loraplex.planner.plan_file import demand_of, plan_to_json, read_plan

PLAN = Plan(
    gpus=(
        GpuPlan(adapters=(AdapterDemand(name="a", rank=8, rate_rps=0.5),), num_slots=8),
        GpuPlan(adapters=(AdapterDemand(name="b", rank=16, rate_rps=0.0),), num_slots=None),
        GpuPlan(adapters=(), num_slots=None),
    ),
    profile="h200-llama-2-7b",
    packer="max-pack",
    prompt_tokens=200.0,
    output_tokens=100.5,
)


def test_a_plan_comes_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan_to_json(PLAN))
    assert read_plan(tmp_path / "plan.json") == PLAN
    with_limit = replace(PLAN, objective=Objective(ttft_s=0.5))
    (tmp_path / "plan.json").write_text(plan_to_json(with_limit))
    assert read_plan(tmp_path / "plan.json") == with_limit
    with_hash = replace(PLAN, profile_sha256="0123")
    (tmp_path / "plan.json").write_text(plan_to_json(with_hash))
    assert read_plan(tmp_path / "plan.json") == with_hash
    assert demand_of(PLAN).offered_tok_s(demand_of(PLAN).adapters) == pytest.approx(0.5 * 300.5)


def test_copies_of_an_adapter_are_one_adapter_with_their_whole_rate(tmp_path: Path) -> None:
    copies = [AdapterDemand(name="a", rank=8, rate_rps=rate) for rate in (0.5, 0.25)]
    plan = replace(PLAN, gpus=tuple(GpuPlan(adapters=(each,), num_slots=None) for each in copies))
    (tmp_path / "plan.json").write_text(plan_to_json(plan))
    read = read_plan(tmp_path / "plan.json")
    assert read == plan
    assert demand_of(read).adapters == (AdapterDemand(name="a", rank=8, rate_rps=0.75),)


def changed(**changes: Any) -> dict[str, Any]:
    adapter = {"name": "a", "rank": 8, "rate_rps": 0.5}
    document = {
        "loraplex_plan": 1,
        "profile": "p",
        "packer": "max-pack",
        "prompt_tokens": 1,
        "output_tokens": 1,
        "gpus": [{"num_slots": None, "adapters": [adapter]}],
    }
    return {**document, **changes}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "has no 'loraplex_plan'"),
        ({"gpus": []}, "has no 'loraplex_plan'"),
        (changed(loraplex_plan=2), "is a plan of version 2"),
        (changed(gpus={}), "gpus is not a list"),
        (changed(gpus=[{"adapters": []}]), "'num_slots' is missing"),
        (changed(gpus=[{"num_slots": 0, "adapters": []}]), "num_slots is not a whole number from 1"),
        (changed(gpus=[{"num_slots": 1, "adapters": [{"name": "a", "rank": 8}]}]), "'rate_rps' is missing"),
        (changed(prompt_tokens="many"), "prompt_tokens is not a number above 0"),
        (changed(profile=None), "profile is not text"),
        (changed(profile="\ud800"), "profile has characters that cannot be shown"),
        (changed(packer="a\u0000b"), "packer has characters that cannot be shown"),
        (changed(profile_sha256=7), "profile_sha256 is not text"),
        (
            changed(gpus=[{"num_slots": 1, "adapters": changed()["gpus"][0]["adapters"] * 2}]),
            "adapter 'a' is there twice on GPU 0",
        ),
        (
            changed(
                gpus=[
                    {"num_slots": 1, "adapters": [{"name": "a", "rank": rank, "rate_rps": 1}]}
                    for rank in (1, 2)
                ]
            ),
            "copies of adapter 'a' have different ranks",
        ),
        (changed(gpus=[1]), "is a broken plan"),
        (changed(gpus=[]), "it has no GPUs"),
        (changed(prompt_tokens=1e300), "prompt_tokens is not a number above 0, and up to 1e+09"),
        (changed(gpus=[{"num_slots": 10**30, "adapters": []}]), "num_slots is not a whole number from 1"),
        (changed(objective=7), "objective is no object"),
        (changed(objective={"itl_s": -1}), "itl_s is not a number above 0"),
        (changed(objective={"e2e_s": 1}), "has 'e2e_s', which this loraplex does not know"),
    ],
)
def test_a_broken_plan_is_refused(tmp_path: Path, document: object, words: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError) as refused:
        read_plan(path)
    assert words in str(refused.value)
    assert "loraplex plan make" in str(refused.value)


def test_what_is_no_json_or_no_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b'{"loraplex_plan": 1, "gpus"')
    with pytest.raises(PlanError, match="is no plan"):
        read_plan(path)
    path.write_text("[" * 200_000)
    with pytest.raises(PlanError, match="is no plan"):
        read_plan(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="is not text"):
        read_plan(path)
    with pytest.raises(StorageError, match="cannot be read"):
        read_plan(tmp_path / "none.json")
