"""Options that the simulating commands share, and reading of the files they name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex.cli.batching_options import parse_delay
from loraplex.cli.durations import Duration, duration_option
from loraplex.cli.profile_names import find_given_profile
from loraplex.cli.profile_table import warn_of_poor_fits
from loraplex.cli.sizes import parse_size
from loraplex.cli.tenant_options import parse_borrowing, parse_tenants
from loraplex.core.batching import Batching
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import UserError

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile
    from loraplex.twin.compare import LiveEngine
    from loraplex.twin.replay import ReplayOptions
    from loraplex.workload.jsonl import WorkloadRequest

ProfilePath = Annotated[
    Path,
    typer.Option(
        "--profile",
        metavar="NAME|PATH",
        help="One of `loraplex profile list`, or a file of `loraplex profile` or `profile fit`.",
    ),
]
WorkloadPath = Annotated[Path, typer.Option("--workload", help="A .jsonl file, one request a line.")]
Model = Annotated[
    str | None, typer.Option(help="Refuse a profile of any other model; named as in the profile.")
]
Adapters = Annotated[
    int | None, typer.Option(min=1, max=10_000_000, help="How many adapters; default: as the workload says.")
]
Ranks = Annotated[
    str | None,
    typer.Option(help="Ranks of the adapters in turn: 8,16,32; default: the workload's, or 16."),
]
Slots = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Slots for adapters (vLLM's --max-loras), with a profile of an engine that has them; default: "
        "one for each adapter.",
    ),
]
Seconds = Annotated[
    Duration | None,
    duration_option(
        "--seconds",
        may_be_least=False,
        text="End the simulation so long, in simulated time, after the first request, whatever still runs.",
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        min=16, max=10**12, help="KV memory in tokens, instead of the profile's; on a GPU adapters share it."
    ),
]
AdapterMib = Annotated[
    float | None,
    typer.Option(help="Size of each adapter in MiB; default: by its rank, in a profile of our own engine."),
]
Modules = Annotated[
    str | None, typer.Option(help="Modules that adapters are on (our own engine): q,k,v (default) or all.")
]
MaxRunning = Annotated[
    int | None, typer.Option(min=1, help="Most requests in a step (our own engine); default: 256.")
]
StartPolicy = Annotated[
    ColdStart | None,
    typer.Option(help="How requests start on absent adapters (our own engine); default: auto on a GPU."),
]
CpuWorkers = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=256,
        help="Processes that compute LoRA beside a GPU; default: as many as the engine would start on the "
        "profile's machine.",
    ),
]
MaxCopyRate = Annotated[
    float | None,
    typer.Option(
        "--max-copy-gb-per-s",
        help="Copies of adapters to the GPU are no faster than this, as on another machine's bus.",
    ),
]
KvSwapMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Host memory for keys and values of preempted requests and for the prefix cache (our own engine "
        "on a GPU); none by default.",
    ),
]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as JSON.")]


_DEFAULT_RANKS = (16,)
_MOST_ADAPTERS = 1_000_000
"""Most adapters of a workload without --adapters: the scheduler keeps state for each, used or not."""
_POOR_ERROR = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinOptions:
    """The options that all simulating commands share."""

    adapters: int | None
    ranks: str | None
    slots: int | None
    kv_tokens: int | None
    adapter_mib: float | None
    modules: str | None
    max_running: int | None
    seconds: float | None = None
    cold_start: ColdStart | None = None
    cpu_workers: int | None = None
    max_copy_gb_per_s: float | None = None
    batching: Batching = Batching.FCFS
    max_delay: str | None = None
    tenants: list[str] | None = None
    max_borrowing: str | None = None
    max_ttft: float | None = None
    kv_swap_memory: str | None = None


def read_profile_of(path: Path, model: str | None) -> Profile:
    """Read a profile by path or name. Warns if it was measured poorly, as predictions are no better."""
    from loraplex.perf.cost_model import CostModel

    profile = find_given_profile(path, model)
    if not isinstance(profile, CostModel):
        return profile
    advice = f"the twin is no better than {path.name}, so measure again when the machine is idle"
    if not warn_of_poor_fits(profile, advice) and (held_out := profile.held_out) is not None:
        worst = max(held_out.decode.mean_error, held_out.prefill.mean_error)
        if worst > _POOR_ERROR:
            typer.echo(
                f"the profile is off by {worst:.0%} on the mean for steps it was not fitted to; measure "
                "again with `loraplex profile` while the machine does nothing else",
                err=True,
            )
    return profile


def read_inputs(
    workload: Path, options: TwinOptions, engine: LiveEngine | None = None
) -> tuple[list[WorkloadRequest], ReplayOptions]:
    """Return the requests, with times counted from the first arrival, and the replay options. `engine`: the
    live engine's settings, used where no option is given."""
    from loraplex.core.modules import module_names
    from loraplex.twin.replay import ReplayOptions, from_first_arrival
    from loraplex.workload.jsonl import WorkloadFile

    rate = options.max_copy_gb_per_s
    if rate is not None and not 0 < rate < math.inf:
        raise typer.BadParameter("must be more than 0", param_hint="--max-copy-gb-per-s")
    mib = options.adapter_mib
    if mib is not None and not 0 < mib < math.inf:
        raise typer.BadParameter("must be more than 0", param_hint="--adapter-mib")
    swap = options.kv_swap_memory
    file = WorkloadFile(workload)
    requests, header = from_first_arrival(list(file)), file.header
    named = max(request.adapter for request in requests) + 1
    if header is None and options.adapters is None and named > _MOST_ADAPTERS:
        raise UserError(
            f"{workload}: a request is on adapter {named - 1:,}, counted from 0, so there would be "
            f"{named:,}; give --adapters if that is meant"
        )
    chosen = ReplayOptions(
        num_adapters=options.adapters or (named if header is None else header.num_adapters),
        ranks=(_DEFAULT_RANKS if header is None else header.ranks)
        if options.ranks is None
        else _ranks(options.ranks),
        num_slots=options.slots,
        until_s=math.inf if options.seconds is None else options.seconds,
        kv_tokens=options.kv_tokens,
        adapter_bytes=None if mib is None else max(int(mib * (1 << 20)), 1),
        modules=None if options.modules is None else module_names(options.modules),
        max_running=options.max_running,
        cold_start=options.cold_start,
        cpu_workers=options.cpu_workers,
        max_copy_bytes_per_s=None if rate is None else rate * 1e9,
        batching=options.batching,
        max_delay=parse_delay(options.max_delay, options.batching),
        tenants=parse_tenants(options.tenants),
        max_borrowing=parse_borrowing(options.max_borrowing),
        max_ttft_s=None if options.max_ttft is None else float(options.max_ttft),
        kv_swap_bytes=0 if swap is None else parse_size(swap, "--kv-swap-memory"),
    )
    if engine is None:
        return requests, chosen
    chosen = _as_live(chosen, options, engine)
    wrapped = (replace(each, adapter=each.adapter % max(chosen.num_adapters, 1)) for each in requests)
    return list(wrapped), chosen


def _as_live(chosen: ReplayOptions, options: TwinOptions, engine: LiveEngine) -> ReplayOptions:
    return replace(
        chosen,
        num_adapters=options.adapters or engine.num_adapters,
        ranks=engine.ranks if options.ranks is None else chosen.ranks,
        modules=chosen.modules or engine.modules,
        kv_tokens=chosen.kv_tokens or engine.kv_tokens,
        work=engine.work,
        batching=engine.batching,
        max_delay=engine.max_delay,
        staged=True,
    )


def _ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(each) for each in text.split(","))
    except ValueError:
        ranks = ()
    if not ranks or min(ranks) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of ranks such as 8,16,32", param_hint="--ranks")
    return ranks
