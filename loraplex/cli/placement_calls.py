"""Calls to a running fleet about its placement.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from loraplex.cli.server_calls import struct_of
from loraplex.core.errors import UserError
from loraplex.core.words import plural

if TYPE_CHECKING:
    from loraplex.fleet.plan import Entry
    from loraplex.planner.plan import Plan
    from loraplex.server.responses import Placement

_PATH: Final = "/v1/fleet/placement"
_MAX_NAME_CHARS: Final = 200
_LEAST_SHARE: Final = 1e-6
"""The least share of requests that a replica can be given."""


def placement_at(base_url: str, api_key: str | None) -> Placement:
    """Return where a fleet serves its adapters. Raises UserError if there is no such fleet."""
    return _call(base_url, api_key)


def give(base_url: str, api_key: str | None, body: dict[str, Any], *, dry_run: bool = False) -> Placement:
    """Hand a placement over; with `dry_run` it is only checked. Raises UserError if the fleet refuses it,
    and changes nothing then."""
    return _call(base_url, api_key, body={**body, "dry_run": dry_run}, method="PUT")


def release(base_url: str, api_key: str | None) -> Placement:
    """Let the fleet's policy place its adapters again."""
    return _call(base_url, api_key, method="DELETE")


def body_of(plan: Plan, replicas: list[int], file_name: str) -> dict[str, Any]:
    """Return the body that hands a plan to a fleet: its first GPU is the first replica, and so on.
    `file_name`: what the fleet shows as its plan. Raises UserError if there are more or fewer replicas than
    GPUs."""
    from loraplex.planner.placement_steps import placement_of

    check_num_gpus(plan, replicas)
    ranks = {each.name: each.rank for gpu in plan.gpus for each in gpu.adapters}
    return {
        "replicas": replicas,
        "adapters": [
            {"lora_name": name, "rank": ranks[name], **_given(entry, replicas)}
            for name, entry in placement_of(plan).items()
        ],
        "plan": _printable(f"{file_name}, packed by {plan.packer}"),
    }


def _printable(name: str) -> str:
    """Return a name as a fleet accepts it: names of files may have any bytes."""
    shown = "".join(each if each.isprintable() else "?" for each in name)
    return shown if len(shown) <= _MAX_NAME_CHARS else f"{shown[: _MAX_NAME_CHARS - 1]}…"


def _given(entry: Entry, replicas: list[int]) -> dict[str, Any]:
    """Return an adapter's replicas, and its shares if there are several: bodies have a limit of lists."""
    given: dict[str, Any] = {"replicas": [replicas[gpu] for gpu in entry.replicas]}
    if len(entry.replicas) > 1:
        given["shares"] = [max(share, _LEAST_SHARE) for share in entry.shares]
    return given


def check_num_gpus(plan: Plan, replicas: list[int]) -> None:
    """Raise UserError unless a fleet has as many replicas as a plan has GPUs."""
    num_gpus, num_replicas = len(plan.gpus), len(replicas)
    if num_gpus == num_replicas:
        return
    # Packers that fill one GPU after the other leave the rest out of the plan.
    raise UserError(
        f"the plan is for {num_gpus} {plural('GPU', num_gpus)}, and the fleet has {num_replicas} "
        f"{plural('replica', num_replicas)}; make one for as many (`loraplex plan make --gpus "
        f"{num_replicas} --packer least-rate`), or change the fleet (`loraplex fleet scale {num_gpus}`)"
    )


def _call(
    base_url: str, api_key: str | None, *, body: dict[str, Any] | None = None, method: str | None = None
) -> Placement:
    from loraplex.server.responses import Placement

    return struct_of(Placement, base_url, _PATH, api_key, kind="replicas", body=body, method=method)
