"""A plan as vLLM's command lines."""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.perf.named_profiles import find_profile
from loraplex.planner.demand import AdapterDemand, PlanError
from loraplex.planner.plan import GpuPlan, Plan
from loraplex.planner.plan_file import plan_to_json
from loraplex.planner.vllm_commands import vllm_commands


def plan_of(*gpus: tuple[dict[str, int], int | None], profile: str = "vllm-h100-llama-3.1-8b") -> Plan:
    """Return a plan of GPUs given as their adapters' ranks, and their slots."""
    return Plan(
        gpus=tuple(
            GpuPlan(
                adapters=tuple(
                    AdapterDemand(name=name, rank=rank, rate_rps=0.1) for name, rank in ranks.items()
                ),
                num_slots=num_slots,
            )
            for ranks, num_slots in gpus
        ),
        profile=profile,
        packer="by hand",
        prompt_tokens=200.0,
        output_tokens=30.0,
    )


profile_named = cache(find_profile)


def commands_of(plan: Plan) -> list[list[str]]:
    profile = profile_named(Path(plan.profile))
    found = vllm_commands(plan, profile, model="acme/base", adapters_dir="/srv/adapters")
    return list(map(words_of, found))


def words_of(command: str) -> list[str]:
    """Return a command's words as a shell reads them; shlex does not join lines."""
    return shlex.split(command.replace("\\\n", ""))


def test_each_gpu_gets_a_command() -> None:
    first, second = commands_of(plan_of(({"a": 8, "b": 24, "c": 4}, 2), ({"d": 256}, 8)))
    assert first[:5] == ["CUDA_VISIBLE_DEVICES=0", "vllm", "serve", "acme/base", "--port"]
    assert "--max-loras 2 --max-lora-rank 32 --max-cpu-loras 3" in " ".join(first)
    assert first[-4:] == ["--lora-modules", *(f"{name}=/srv/adapters/{name}" for name in "abc")]
    assert "--port 8001" in " ".join(second)
    assert "--max-loras 8 --max-lora-rank 256 --max-cpu-loras 8" in " ".join(second)


def test_engines_get_the_limits_that_the_plan_was_simulated_with() -> None:
    for profile, most in (("vllm-h100-llama-3.1-8b", 765), ("vllm-h100-qwen-2.5-7b", 945)):
        (command,) = commands_of(plan_of(({"a": 8}, 1), profile=profile))
        assert f"--max-num-seqs {most} --max-num-batched-tokens 8192" in " ".join(command)


@given(st.text(min_size=1, max_size=12))
def test_any_name_reaches_vllm_whole(name: str) -> None:
    assume("/" not in name and name not in (".", ".."))
    (command,) = commands_of(plan_of(({name: 8}, 1)))
    given_module = command[-1]
    if given_module.startswith("{"):
        assert json.loads(given_module)["name"] == name
    else:
        assert given_module.split("=") == [name, f"/srv/adapters/{name}"]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of(({"a": 8}, None), profile="h200-llama-2-7b"), "has no slots to set"),
        (plan_of(({"a": 8}, None)), "GPU 0 of the plan has no slots, and the profile is of an engine with"),
        (plan_of(({"a": 8, "huge": 1024}, 4)), "adapter 'huge' has rank 1024"),
        (plan_of(({"/etc/a": 8}, 4)), "the folder of adapter '/etc/a' is not in /srv/adapters; rename it"),
        (plan_of(({"org/../../a": 8}, 4)), "is not in /srv/adapters"),
    ],
)
def test_what_vllm_cannot_serve_is_said(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        commands_of(plan)


def test_gpus_are_numbered_on_each_machine() -> None:
    plan = plan_of(*[({name: 8}, 1) for name in "abcde"])
    profile = profile_named(Path(plan.profile))
    found = vllm_commands(plan, profile, model="m", adapters_dir="d", gpus_per_machine=2)
    assert [each.split(" vllm ")[0] for each in found] == [
        f"# machine {machine}\nCUDA_VISIBLE_DEVICES={device}"
        for machine, device in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    ]


def test_the_command_prints_them(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(plan_of(({"a": 8, "b": 16}, 2), ({}, 1))))
    args = ["plan", "apply", str(path), "--vllm-commands"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert words_of(done.stdout)[-1] == "b=adapters/b"
    assert "GPU 1 has no adapters" in done.stderr
    assert "--model" in done.stderr
    named = CliRunner().invoke(app, [*args, "--model", "acme/base; reboot", "--adapters-dir", "/srv/x y"])
    assert "acme/base; reboot" in words_of(named.stdout)
    assert json.loads(words_of(named.stdout)[-1]) == {"name": "b", "path": "/srv/x y/b"}
    elsewhere = CliRunner().invoke(app, [*args, "--gpus-per-machine", "1"])
    assert elsewhere.stdout.startswith("# machine 0\nCUDA_VISIBLE_DEVICES=0 vllm serve ")
    dry = CliRunner().invoke(app, [*args, "--dry-run"])
    assert dry.exit_code == 2
    assert "changes nothing; leave it out" in " ".join(dry.stderr.replace("│", " ").split())


def test_a_plan_that_fails_in_the_twin_is_printed_only_if_that_is_forced(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(plan_of(({"a": 32}, 1000))))
    args = ["plan", "apply", str(path), "--vllm-commands"]
    refused = CliRunner().invoke(app, args)
    assert "GPU 0 has no memory for so many slots" in str(refused.exception)
    assert "vllm serve" not in refused.stdout
    assert "--max-loras 1000" in CliRunner().invoke(app, [*args, "--force"]).stdout
