"""A plan as a file (JSON): who serves what, what it was made for, and by what.

{"loraplex_plan": 1, "profile": ..., "profile_sha256": ..., "packer": ..., "prompt_tokens": ...,
 "output_tokens": ..., "objective": {"ttft_s": 0.5, "itl_s": null},
 "gpus": [{"num_slots": 64, "adapters": [{"name": ..., "rank": 16, "rate_rps": 0.1}, ...]}, ...]}

An adapter on several GPUs has copies, each with the part of its rate that its GPU gets. A plan for fewer GPUs
than were asked for has "num_spare_gpus", too. Old plans have no "profile_sha256", a hash of what the profile
predicts with.
Without an "objective" nobody may starve, and that is all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from loraplex.core.errors import StorageError
from loraplex.planner.demand import MAX_RATE_RPS, AdapterDemand, Demand, PlanError
from loraplex.planner.objectives import Objective
from loraplex.planner.plan import GpuPlan, Plan, whole_adapters
from loraplex.planner.ranks import LARGEST_RANK

VERSION: Final = 1
_VERSION_KEY: Final = "loraplex_plan"
_MAX_SLOTS: Final = 1_000_000
_MOST: Final = 1e9
"""Most tokens of a request, and seconds of a limit: more are surely not meant."""
_MAKE_ONE: Final = "make one with `loraplex plan make`"


def plan_to_json(plan: Plan) -> str:
    """Return the text of a plan's file."""
    document = {
        _VERSION_KEY: VERSION,
        "profile": plan.profile,
        **({"profile_sha256": plan.profile_sha256} if plan.profile_sha256 is not None else {}),
        "packer": plan.packer,
        "prompt_tokens": plan.prompt_tokens,
        "output_tokens": plan.output_tokens,
        **({"objective": asdict(plan.objective)} if plan.objective.has_limits else {}),
        **({"num_spare_gpus": plan.num_spare_gpus} if plan.num_spare_gpus else {}),
        "gpus": [asdict(gpu) for gpu in plan.gpus],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def read_plan(path: Path) -> Plan:
    """Read a plan. Raises PlanError for anything that is not one, with what is wrong and what to do."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror}); {_MAKE_ONE}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is no plan: it is not text; {_MAKE_ONE}") from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is no plan: {error}; {_MAKE_ONE}") from None
    if not isinstance(document, dict) or _VERSION_KEY not in document:
        raise PlanError(f"{path} is no plan: it has no {_VERSION_KEY!r}; {_MAKE_ONE}")
    if document[_VERSION_KEY] != VERSION:
        raise PlanError(
            f"{path} is a plan of version {document[_VERSION_KEY]!r}, and this loraplex reads version "
            f"{VERSION}; {_MAKE_ONE} of this version"
        )
    try:
        return _plan_of(document)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{path} is a broken plan: {what}; {_MAKE_ONE}") from None


def _plan_of(document: Mapping[str, Any]) -> Plan:
    gpus = tuple(_gpu_of(fields) for fields in _list(document["gpus"], "gpus"))
    if not gpus:
        raise ValueError("it has no GPUs")
    _check_copies(gpus)
    spare, sha256 = document.get("num_spare_gpus", 0), document.get("profile_sha256")
    return Plan(
        gpus=gpus,
        profile=_text(document["profile"], "profile"),
        packer=_text(document["packer"], "packer"),
        prompt_tokens=_positive(document["prompt_tokens"], "prompt_tokens"),
        output_tokens=_positive(document["output_tokens"], "output_tokens"),
        objective=_objective_of(document.get("objective", {})),
        num_spare_gpus=_whole(spare, "num_spare_gpus", _MAX_SLOTS) if spare != 0 else 0,
        profile_sha256=None if sha256 is None else _text(sha256, "profile_sha256"),
    )


def _objective_of(fields: object) -> Objective:
    if not isinstance(fields, dict):
        raise ValueError("objective is no object")
    if unknown := fields.keys() - {"ttft_s", "itl_s"}:
        raise ValueError(f"the objective has {min(unknown)!r}, which this loraplex does not know")
    limits = {key: _positive(value, key) for key, value in fields.items() if value is not None}
    return Objective(**limits)


def _check_copies(gpus: Sequence[GpuPlan]) -> None:
    ranks: dict[str, int] = {}
    for number, gpu in enumerate(gpus):
        here: set[str] = set()
        for copy in gpu.adapters:
            if copy.name in here:
                raise ValueError(f"adapter {copy.name!r} is there twice on GPU {number}")
            if ranks.setdefault(copy.name, copy.rank) != copy.rank:
                raise ValueError(f"copies of adapter {copy.name!r} have different ranks")
            here.add(copy.name)


def _gpu_of(fields: Mapping[str, Any]) -> GpuPlan:
    num_slots = fields["num_slots"]
    if num_slots is not None:
        num_slots = _whole(num_slots, "num_slots", _MAX_SLOTS)
    adapters = tuple(_adapter_of(each) for each in _list(fields["adapters"], "adapters"))
    return GpuPlan(adapters=adapters, num_slots=num_slots)


def _adapter_of(fields: Mapping[str, Any]) -> AdapterDemand:
    rate_rps = fields["rate_rps"]
    if rate_rps != 0:
        rate_rps = _positive(rate_rps, "rate_rps", MAX_RATE_RPS)
    return AdapterDemand(
        name=_text(fields["name"], "name"),
        rank=_whole(fields["rank"], "rank", LARGEST_RANK),
        rate_rps=float(rate_rps),
    )


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is not a list")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is not text")
    if not value.isprintable():
        raise ValueError(f"{what} has characters that cannot be shown")
    return value


def _whole(value: object, what: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{what} is not a whole number from 1 to {most:,}")
    return value


def _positive(value: object, what: str, most: float = _MOST) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise ValueError(f"{what} is not a number above 0, and up to {most:g}")
    return float(value)


def demand_of(plan: Plan) -> Demand:
    """Return the demand that a plan was made for: copies count as one adapter."""
    return Demand(
        adapters=whole_adapters(plan.gpus),
        prompt_tokens=plan.prompt_tokens,
        output_tokens=plan.output_tokens,
    )
