"""A plan of slot engines as the commands that start them: one `vllm serve` for each GPU.

They set what the plan was simulated with: slots, and from the profile the most requests and tokens of a step.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import PurePosixPath
from typing import Final

from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.perf.slot_profile import SlotProfile
from loraplex.planner.check import check_kind
from loraplex.planner.demand import PlanError
from loraplex.planner.plan import SLOT_RANKS, GpuPlan, Plan

FIRST_PORT: Final = 8000
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./:@-]*")
"""Names and paths that vLLM splits rightly at the '='; others are written as JSON."""
_PER_LINE: Final = " \\\n    "


def vllm_commands(
    plan: Plan,
    profile: Profile,
    *,
    model: str,
    adapters_dir: str,
    first_port: int = FIRST_PORT,
    gpus_per_machine: int | None = None,
) -> list[str]:
    """Return a command, quoted for a shell, for each GPU that has adapters; its port is `first_port` plus the
    number of its GPU. `profile`: of the plan. `adapters_dir`: the folder with a subfolder for each adapter.
    `gpus_per_machine`: None if all GPUs are in one machine; otherwise GPUs are numbered on each, and a
    comment says which machine a command is for.

    Raises PlanError for a plan of an engine without slots, or for a rank that vLLM does not serve."""
    check_kind(plan, profile)
    if isinstance(profile, CostModel):
        raise PlanError(
            "the plan is for loraplex's own engine, which has no slots to set; apply it to a running fleet "
            "(`loraplex plan apply PLAN --url URL`), or make one with a profile of vLLM"
        )
    commands = []
    for number, gpu in enumerate(plan.gpus):
        if not gpu.adapters:
            continue
        machine, device = (0, number) if gpus_per_machine is None else divmod(number, gpus_per_machine)
        command = _command(
            gpu,
            profile,
            device=device,
            model=model,
            adapters_dir=adapters_dir,
            port=first_port + number,
        )
        commands.append(command if gpus_per_machine is None else f"# machine {machine}\n{command}")
    return commands


def _command(
    gpu: GpuPlan, profile: SlotProfile, *, device: int, model: str, adapters_dir: str, port: int
) -> str:
    assert gpu.num_slots is not None
    if gpu.slot_rank not in SLOT_RANKS:
        largest = max(gpu.adapters, key=lambda each: each.rank)
        raise PlanError(
            f"adapter {largest.name!r} has rank {largest.rank}, and vLLM serves ranks up to "
            f"{SLOT_RANKS[-1]}; leave it out of the demand, and make the plan again"
        )
    rank, num_held = gpu.slot_rank, max(gpu.num_slots, len(gpu.adapters))
    words = [
        f"CUDA_VISIBLE_DEVICES={device} vllm serve {shlex.quote(model)} --port {port}",
        f"--max-num-seqs {profile.max_running} --max-num-batched-tokens {profile.max_step_tokens}",
        f"--enable-lora --max-loras {gpu.num_slots} --max-lora-rank {rank} --max-cpu-loras {num_held}",
        "--lora-modules",
    ]
    modules = [_module(each.name, _folder(adapters_dir, each.name)) for each in gpu.adapters]
    return _PER_LINE.join([*words, *map(shlex.quote, modules)])


def _folder(adapters_dir: str, name: str) -> str:
    """Return the folder of an adapter. Raises PlanError for one that lies elsewhere."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise PlanError(
            f"the folder of adapter {name!r} is not in {adapters_dir}; rename it, and make the plan again"
        )
    return str(PurePosixPath(adapters_dir) / path)


def _module(name: str, path: str) -> str:
    """Return an adapter as vLLM's --lora-modules takes it."""
    if _PLAIN.fullmatch(name) and _PLAIN.fullmatch(path):
        return f"{name}={path}"
    return json.dumps({"name": name, "path": path})
