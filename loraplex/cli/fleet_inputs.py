"""The inputs of simulated fleets, from their options and files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from loraplex.cli.json_out import check_picture, check_writable
from loraplex.cli.sizes import parse_rate
from loraplex.cli.slo import AskedSlo
from loraplex.cli.twin_options import TwinOptions, read_inputs, read_profile_of
from loraplex.core.errors import UserError
from loraplex.core.words import unknown_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loraplex.fleet.policy import Policy
    from loraplex.twin.fleet_compare import FleetInputs

_SLOWEST_LINK: Final = 1e6
_MOST_REPLICAS: Final = 10_000
_MANY_ADAPTERS: Final = 100_000
"""Number of adapters from which a plan takes seconds."""


def check_files(profile: Path, workload: Path, json_out: Path | None, plot: Path | None) -> None:
    check_writable(json_out, inputs=(profile, workload))
    if plot is not None and json_out is not None and plot.resolve() == json_out.resolve():
        raise typer.BadParameter(
            f"{plot} is also what --json names, and only one of them can be there; name another",
            param_hint="--plot",
        )
    check_picture(plot, inputs=(profile, workload))


def named_policies(text: str) -> list[Policy]:
    from loraplex.fleet.policy import Policy

    names = [name.strip() for name in text.split(",")]
    if "" in names:
        raise UserError(
            f"--policies {text!r}: a name is missing; write them with commas, such as random,auto"
        )
    found = [Policy.of_name(name) for name in names]
    for policy in found:
        if found.count(policy) > 1:
            raise UserError(f"--policies {text}: {policy.name} is named twice; leave one of them out")
    return found


def check_fit(policies: Sequence[Policy], inputs: FleetInputs) -> None:
    """Raise UserError, before anything runs, for a policy that does not apply to the profile's engine."""
    from loraplex.fleet.policy import PLACEMENTS
    from loraplex.perf.slot_profile import SlotProfile

    for policy in policies:
        named = PLACEMENTS[policy.placement]
        if named is not None and named.needs_device_bytes and isinstance(inputs.profile, SlotProfile):
            raise UserError(
                f"{policy.name}: {policy.placement} is about memory that adapters share with the KV cache, "
                "and the profile is of an engine with slots for adapters; choose another placement"
            )


def fleet_inputs(
    profile: Path,
    workload: Path,
    replicas: int,
    asked: AskedSlo,
    period: float,
    link: str | None,
    costs: str,
    warm: bool,
    options: TwinOptions,
) -> FleetInputs:
    from loraplex.perf.set_costs import CostForm
    from loraplex.perf.slot_profile import SlotProfile
    from loraplex.twin.fleet_compare import FleetInputs
    from loraplex.twin.fleet_run import FleetOptions, base_times
    from loraplex.twin.links import LinkSpeed

    if costs not in {*CostForm}:
        raise UserError(f"--costs: {unknown_name('form of costs', costs, CostForm)}")
    speed = None if link is None else LinkSpeed(bytes_per_s=parse_rate(link, "--link"))
    if speed is not None and speed.bytes_per_s < _SLOWEST_LINK:
        raise typer.BadParameter(
            f"at {link} an adapter takes minutes; give 1MB/s or more", param_hint="--link"
        )
    if not 1 <= replicas <= _MOST_REPLICAS:
        raise typer.BadParameter(
            f"must be at least 1 and at most {_MOST_REPLICAS:,}, not {replicas:,}", param_hint="--replicas"
        )
    found = read_profile_of(profile, None)
    requests, replay_options = read_inputs(workload, options)
    adapter_bytes = None
    if isinstance(found, SlotProfile):  # the engine ignores sizes, but links need them
        if options.slots is None:
            number = replay_options.num_adapters
            typer.echo(
                f"the profile is of an engine with slots: each replica has {number:,}, one for each adapter, "
                "unless --slots says how many (vLLM's --max-loras)",
                err=True,
            )
        adapter_bytes = replay_options.adapter_bytes
        replay_options = replace(replay_options, adapter_bytes=None)
    return FleetInputs(
        profile=found,
        workload=requests,
        options=FleetOptions(
            num_replicas=replicas,
            replay=replay_options,
            slo=asked.slo(lambda: base_times(found, requests, replay_options)),
            period_s=float(period),
            link=speed,
            adapter_bytes=adapter_bytes,
            cost_form=CostForm(costs),
            warm=warm,
        ),
    )


def plans_in_words(policies: Sequence[Policy], inputs: FleetInputs) -> str:
    """Return a note if plans take long, as no progress is reported while one is made."""
    from loraplex.fleet.policy import PLACEMENTS

    number = inputs.options.replay.num_adapters
    if number < _MANY_ADAPTERS or not any(PLACEMENTS[each.placement] for each in policies):
        return ""
    return f", and plans for {number:,} adapters, each of which takes seconds"


def cut_to(inputs: FleetInputs, seconds: float) -> FleetInputs:
    """Return the inputs with only the requests that arrive within `seconds` of the first, and no end of the
    simulation."""
    requests = [each for each in inputs.workload if each.arrival_s < seconds]
    endless = replace(inputs.options.replay, until_s=math.inf)
    return replace(inputs, workload=requests, options=replace(inputs.options, replay=endless))
