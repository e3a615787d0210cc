"""Replays a workload file on a profiled engine of either kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from loraplex.adapters.merged_layout import layout_bytes
from loraplex.core.batching import Batching, DelayBound
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import CapacityError, UserError
from loraplex.core.modules import GROUPS
from loraplex.core.tenants import TenantPolicy
from loraplex.perf.assist_split import default_num_workers
from loraplex.perf.cost_model import CostModel, with_copies_at_most
from loraplex.perf.drift import DriftWatch
from loraplex.perf.named_profiles import Profile
from loraplex.perf.profile_json import ProfileError
from loraplex.perf.slot_profile import SlotProfile
from loraplex.perf.subject import shape_of_key
from loraplex.scheduling.arena import Arena
from loraplex.scheduling.batching.thresholds import Tuning
from loraplex.scheduling.blocks import BlockPool
from loraplex.scheduling.config import SchedulerConfig
from loraplex.scheduling.cpu_workers import choose_num_workers
from loraplex.scheduling.host_kv import host_kv_of
from loraplex.scheduling.memory import Memory, SeparateMemory
from loraplex.scheduling.work import StepWork
from loraplex.twin.ahead import AheadSimulator
from loraplex.twin.counted_blocks import CountedPool
from loraplex.twin.outcome import Outcome
from loraplex.twin.paused_collector import paused_collector
from loraplex.twin.simulator import Simulator
from loraplex.twin.times import CostModelTimes, StepTimes
from loraplex.workload.jsonl import WorkloadRequest

_MODULES: Final = GROUPS["qkv"]
MAX_RUNNING: Final = 256
_NUM_REPORTS: Final = 200
"""Times that a run reports how far it is, at most."""
MAX_WAITING: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """Options of a simulation on one engine.

    `ranks`: the adapters' ranks, repeated cyclically. `until_s`: when the simulation ends. `staged`: adapters
    are in host memory at the start.

    For an engine with slots, `num_slots` and `slot_rank` are the number of slots and the rank they hold; None
    for the number of adapters, and for the largest of their ranks.

    For our own engine, `adapter_bytes` is the size of each adapter, or `rank_bytes` its size per unit of
    rank; without both, the profile's size of adapters on `modules`. `work`: the limit of a step; None for the
    profile's. `cold_start`: None for the default of the profile's device. `cpu_workers`: CPU processes that
    compute LoRA for adapters that are being copied to a GPU; None for as many as the engine would start on
    the profile's machine. `max_copy_bytes_per_s`: those copies are no faster than this. `batching`,
    `max_delay`, `tuning`: as in `SchedulerConfig`. `kv_swap_bytes`: host memory for keys and values; 0 for
    none. `tenants`: their rights, as far as they have any.

    `max_ttft_s`, `max_waiting`: limits of the server in front, which also refuses requests that would miss
    the objective of their tenant.
    """

    num_adapters: int
    ranks: tuple[int, ...] = (16,)
    num_slots: int | None = None
    slot_rank: int | None = None
    until_s: float = math.inf
    kv_tokens: int | None = None
    adapter_bytes: int | None = None
    rank_bytes: int | None = None
    modules: tuple[str, ...] | None = None
    host_memory: int | None = None
    max_running: int | None = None
    work: StepWork | None = None
    cold_start: ColdStart | None = None
    cpu_workers: int | None = None
    max_copy_bytes_per_s: float | None = None
    batching: Batching = Batching.FCFS
    max_delay: DelayBound = field(default_factory=DelayBound)
    tuning: Tuning = Tuning.PAPER
    kv_swap_bytes: int = 0
    staged: bool = False
    seed: int = 0
    tenants: tuple[TenantPolicy, ...] = ()
    max_borrowing: float | None = None
    max_ttft_s: float | None = None
    max_waiting: int = MAX_WAITING

    @property
    def limits_waiting(self) -> bool:
        """Return whether requests may be refused."""
        return self.max_ttft_s is not None or bool(self.tenants)


_ON_A_GPU: Final = (ColdStart.PIPELINED, ColdStart.CPU_ASSIST, ColdStart.AUTO)


def check_workload(workload: Sequence[WorkloadRequest], options: ReplayOptions) -> None:
    """Raise an error that names the request if no twin could run the workload."""
    knows_tenants = options.batching.knows_tenants
    for number, request in enumerate(workload, start=1):
        if request.adapter >= max(options.num_adapters, 1):  # without adapters, all are for the base model
            raise UserError(
                f"request {number} of the workload is on adapter {request.adapter}; there are "
                f"{options.num_adapters}, counted from 0; give more --adapters"
            )
        if request.tenant and not knows_tenants:
            raise UserError(
                f"request {number} of the workload is of tenant {request.tenant!r}, and --batching "
                f"{options.batching} knows no tenants; choose fcfs, grouped or auto, or make a workload "
                "without --tenants"
            )


def check_options(profile: Profile, options: ReplayOptions) -> None:
    """Raise UserError for an option that has no effect on this kind of engine."""
    if not options.batching.knows_tenants and (options.tenants or options.max_borrowing is not None):
        raise UserError(
            f"--batching {options.batching} knows no tenants; leave --tenant and --max-borrowing out, or "
            "choose fcfs, grouped or auto"
        )
    if isinstance(profile, CostModel):
        if options.num_slots is not None:
            raise UserError("the profile is of an engine without slots; leave --slots out")
        on_gpu = profile.subject.device == "cuda"
        of_a_gpu = options.cpu_workers or options.max_copy_bytes_per_s or options.cold_start in _ON_A_GPU
        if not on_gpu and of_a_gpu:
            raise UserError(
                "the profile is of an engine on a CPU, which copies no adapters to a GPU; leave "
                "--cpu-workers and --max-copy-gb-per-s out, and choose --cold-start overlap, on-demand or "
                "cached"
            )
        if options.kv_swap_bytes and not on_gpu:
            raise UserError(
                "the profile is of an engine on a CPU, whose KV cache is in host memory already; leave "
                "--kv-swap-memory out"
            )
        if options.cpu_workers and options.cold_start not in (None, ColdStart.CPU_ASSIST, ColdStart.AUTO):
            raise UserError("--cpu-workers go with --cold-start cpu-assist or auto; leave them out")
        return
    for name, value in (
        ("--max-running", options.max_running),
        ("--modules", options.modules),
        ("--adapter-mib", options.adapter_bytes),
        ("--cold-start", options.cold_start),
        ("--cpu-workers", options.cpu_workers),
        ("--max-copy-gb-per-s", options.max_copy_bytes_per_s),
        ("--batching", None if options.batching is Batching.FCFS else options.batching),
        ("--kv-swap-memory", options.kv_swap_bytes or None),
        ("--max-ttft", options.max_ttft_s),
        ("--tenant", options.tenants or None),
    ):
        if value is not None:
            raise UserError(f"the profile is of an engine with slots, which it says all of; leave {name} out")


def replay(
    profile: Profile,
    workload: Sequence[WorkloadRequest],
    options: ReplayOptions,
    report: Callable[[float], None] | None = None,
) -> Outcome:
    """Simulate a workload on a profiled engine. `report`: gets the share of requests that have ended, on our
    own engine; an engine with slots takes too little time for that."""
    check_workload(workload, options)
    check_options(profile, options)
    with paused_collector():
        if isinstance(profile, SlotProfile):
            return _on_slots(profile, workload, options)
        return _on_ours(profile, workload, options, report)


def _on_ours(
    profile: CostModel,
    workload: Sequence[WorkloadRequest],
    options: ReplayOptions,
    report: Callable[[float], None] | None,
) -> Outcome:
    engines = OwnEngines(profile, options, longest=longest_of(workload))
    simulator = engines.make()
    for number in range(options.num_adapters):
        engines.register(simulator, number)
    if options.staged:
        simulator.stage_all()
    return simulator.run(
        workload, options.until_s, None if report is None else _shares(report, len(workload))
    )


def _shares(report: Callable[[float], None], num_requests: int) -> Callable[[int], None]:
    """Return a function that reports a number of requests as their share, if it has grown since."""
    reported = 0

    def ended(number: int) -> None:
        nonlocal reported
        if (number - reported) * _NUM_REPORTS >= num_requests:
            reported = number
            report(number / num_requests)

    return ended


def from_first_arrival(workload: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Return the same requests with the first arrival at 0. Times may count from any moment, such as 1970,
    and the time before the first request is not part of a run."""
    first_s = workload[0].arrival_s if workload else 0.0
    if first_s == 0.0:
        return list(workload)
    return [replace(each, arrival_s=each.arrival_s - first_s) for each in workload]


def longest_of(workload: Iterable[WorkloadRequest]) -> int:
    """Return the prompt and output tokens of the longest request."""
    return max((each.prompt_tokens + each.output_tokens for each in workload), default=1)


class OwnEngines:
    """Makes identical twins of our own engine. `ranks`, `sizes` (in bytes): of the adapters, by number.
    `kv_tokens`: KV memory while there is no adapter."""

    def __init__(self, profile: CostModel, options: ReplayOptions, *, longest: int) -> None:
        """`longest`: tokens of the longest request. Raises CapacityError if it could never run, and
        ProfileError if the profile has no memory sizes."""
        if options.max_copy_bytes_per_s is not None:
            profile = with_copies_at_most(profile, options.max_copy_bytes_per_s)
        self._profile = profile
        self._options = options
        if profile.memory is None:
            raise ProfileError(
                "the profile has no 'memory': it was not measured; make one with `loraplex profile`"
            )
        self._has = profile.memory
        self._versions = [f"adapter-{number}" for number in range(options.num_adapters)]
        self._numbers = {version: number for number, version in enumerate(self._versions)}
        of_rank = {rank: self._bytes_of_rank(rank) for rank in set(options.ranks)}
        self.ranks = [options.ranks[number % len(options.ranks)] for number in range(options.num_adapters)]
        self.sizes = [of_rank[rank] for rank in self.ranks]
        self.adapter_bytes = dict(zip(self._versions, self.sizes, strict=True))
        on_gpu = profile.subject.device == "cuda"
        self._kind = AheadSimulator if on_gpu else Simulator
        cold_start = options.cold_start or (ColdStart.AUTO if on_gpu else ColdStart.OVERLAP)
        self._config = SchedulerConfig(
            max_model_len=self._has.max_context,
            max_running=options.max_running or MAX_RUNNING,
            work=options.work
            or StepWork(max_tokens=self._has.step_tokens, position_cost=self._has.position_cost),
            cold_start=cold_start,
            num_workers=self._num_workers(cold_start) if options.cpu_workers is None else options.cpu_workers,
            batching=options.batching,
            max_delay=options.max_delay,
            tuning=options.tuning,
            max_borrowing=options.max_borrowing,
        )
        self._merge_bytes = self._bytes_of_merged() if options.batching.merges else 0
        if longest > self._has.max_context:
            raise CapacityError(
                f"the engine's context holds {self._has.max_context} tokens, too few for a request "
                f"of {longest} (prompt and answer); shorten it in the workload, or make one by `loraplex "
                "workload make` with a lower --max-prompt-tokens and --max-output-tokens"
            )
        largest = max(self.adapter_bytes.values(), default=0)
        room = self._memory().max_tokens(largest)
        if longest > room:
            shares = self._has.arena_bytes is not None and largest > 0
            beside = f" beside an adapter of {largest / 2**20:.7g} MiB" if shares else ""
            raise CapacityError(
                f"KV memory holds {max(room, 0)} tokens{beside}, too few for a request of {longest}; give "
                f"more --kv-tokens{', or smaller adapters' if beside else ''}"
            )

    def make(self, times: StepTimes | None = None) -> Simulator:
        """Return a simulator without adapters. `times`: step times, instead of the profile's."""
        simulator = self._kind(
            config=self._config,
            memory=self._memory(),
            times=times or self._times(),
            adapters=self._versions,
            costs=DriftWatch(self._profile),
        )
        simulator.scheduler.fair.set_policies(self._options.tenants)
        return simulator

    def _times(self) -> StepTimes:
        merge_bytes = dict.fromkeys(self._versions, self._merge_bytes)
        return CostModelTimes(self._profile, self.adapter_bytes, merge_bytes, self._config.num_workers)

    def adapter_number(self, version: str) -> int:
        return self._numbers[version]

    def register(self, simulator: Simulator, adapter: int) -> None:
        version = self._versions[adapter]
        simulator.scheduler.adapters.add(version, self.adapter_bytes[version])
        if self._merge_bytes > 0:
            simulator.scheduler.batcher.merged.know(version, self._merge_bytes)

    def unstage(self, simulator: Simulator, adapter: int) -> bool:
        """Evict the copy in the engine's host memory; return False if the device is copying it."""
        version = self._versions[adapter]
        simulator.scheduler.adapters.unstage(version)
        return not simulator.is_staged(version)

    def _bytes_of_merged(self) -> int:
        """Return the bytes of the weights that an adapter is merged into."""
        modules, subject = {*(self._options.modules or _MODULES)}, self._profile.subject
        groups = [name for name, linears in GROUPS.items() if modules.intersection(linears)]
        try:
            shape = shape_of_key(subject.model)
        except ValueError as error:
            raise ProfileError(
                f"the profile does not say how large merged weights are ({error}); make one with `loraplex "
                "profile`, or simulate --batching fcfs or grouped"
            ) from error
        return layout_bytes(groups, shape, subject.element_bytes)

    def _num_workers(self, cold_start: ColdStart) -> int:
        """Return how many CPU workers the engine would start on the profile's machine."""
        subject = self._profile.subject
        if subject.device != "cuda" or subject.num_cores is None:
            return 0
        return choose_num_workers(
            cold_start,
            self._profile,
            rank_bytes=self._has.bytes_per_rank(GROUPS["qkv"]),
            most=default_num_workers(subject.num_cores),
        )

    def _bytes_of_rank(self, rank: int) -> int:
        options = self._options
        if options.rank_bytes is not None:
            return options.rank_bytes * rank
        if options.adapter_bytes is not None:
            return options.adapter_bytes
        return self._has.adapter_bytes(rank, options.modules or _MODULES)

    @property
    def rank_bytes(self) -> float:
        """Bytes per unit of rank; the mean if all adapters are given the same size."""
        options = self._options
        if options.rank_bytes is not None:
            return options.rank_bytes
        if options.adapter_bytes is not None:
            return options.adapter_bytes * len(options.ranks) / sum(options.ranks)
        return self._has.bytes_per_rank(options.modules or _MODULES)

    @property
    def max_running(self) -> int:
        return self._config.max_running

    @property
    def kv_tokens(self) -> int:
        return self._memory().max_tokens(0)

    def _memory(self) -> Memory:
        has, kv_tokens, host_bytes = self._has, self._options.kv_tokens, self._options.host_memory
        host_bytes, block_size = has.host_bytes if host_bytes is None else host_bytes, has.block_tokens
        if has.kv_tokens is not None:
            return SeparateMemory(
                num_blocks=max((has.kv_tokens if kv_tokens is None else kv_tokens) // block_size, 1),
                block_size=block_size,
                adapter_bytes=host_bytes,
                pool=CountedPool,
            )
        assert has.arena_bytes is not None
        page_bytes = has.token_bytes * block_size
        arena_bytes = has.arena_bytes if kv_tokens is None else kv_tokens * has.token_bytes
        host_kv = host_kv_of(self._options.kv_swap_bytes, page_bytes)
        return Arena(
            num_pages=max(arena_bytes // page_bytes, 1),
            page_bytes=page_bytes,
            block_size=block_size,
            host_bytes=host_bytes,
            # Swapping depends on the contents of blocks: they are numbered, and found again.
            pool=CountedPool if host_kv is None else BlockPool,
            host_kv=host_kv,
        )


def _on_slots(profile: SlotProfile, workload: Sequence[WorkloadRequest], options: ReplayOptions) -> Outcome:
    from loraplex.twin.slot_engines import SlotEngines

    workload = [each for each in workload if each.arrival_s < options.until_s]
    engines = SlotEngines(profile, options, longest=longest_of(workload))
    return engines.run(workload)
