"""Replicas on this machine: engine processes, each with its own GPUs or cores."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from loraplex.core.errors import UserError
from loraplex.core.shape import ModelShape
from loraplex.core.words import plural
from loraplex.engine.machine import available_bytes, max_threads
from loraplex.engine.options import EngineOptions
from loraplex.fleet.live_policy import check_live_policy
from loraplex.fleet.policy import Policy
from loraplex.fleet.replanner import PERIOD_S
from loraplex.perf.assist_split import default_num_workers
from loraplex.server.engine_client import ClientOptions, EngineClient
from loraplex.server.fleet.decision_log import DecisionLog
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import MAX_REPLICAS, FleetSetup, limits_of
from loraplex.server.fleet.guessed_costs import guessed_costs
from loraplex.server.pool.directory import PoolDirectory

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_GPUS: Final = Path("/proc/driver/nvidia/gpus")


def local_fleet(
    engine: EngineOptions,
    shape: ModelShape,
    *,
    num_replicas: int,
    policy: Policy,
    period_s: float = PERIOD_S,
    factory: str,
    log: DecisionLog | None = None,
) -> FleetEngine:
    """Return a fleet of engine processes on this machine, not started yet.

    Raises UserError for a policy that is not possible, and if there are too few GPUs or too little memory.
    """
    gpus = _gpus() if engine.device != "cpu" else ()
    check_live_policy(policy, shares_memory=bool(gpus))
    most = _most_on_gpus(engine, gpus) if gpus else _most_in_memory(engine)
    if most is not None and num_replicas > most[0]:
        fix = (
            "lower --replicas or --tensor-parallel, or use --device cpu"
            if gpus
            else "lower --replicas or --kv-memory"
        )
        raise UserError(f"there can be {most[0]} {plural('replica', most[0])} at most: {most[1]}; {fix}")
    engine = with_share(engine, num_replicas, max_threads(), on_gpu=bool(gpus))

    pool = PoolDirectory()

    def make(number: int) -> EngineClient:
        """Create the replica with this number, with its own GPUs."""
        own = gpus[number * engine.tensor_parallel : (number + 1) * engine.tensor_parallel]
        env = {_VISIBLE: ",".join(own)} if own else {}
        return EngineClient(
            engine,
            factory=factory,
            options=ClientOptions(env=env),
            pool=pool.member(number),
            name=process_name(number),
        )

    setup = FleetSetup(
        make=make,
        limits=limits_of(engine),
        policy=policy,
        period_s=period_s,
        costs=guessed_costs(shape, "cuda" if gpus else "cpu", engine.num_threads),
        most=most,
    )
    return FleetEngine(setup, num_replicas, log)


def with_share(engine: EngineOptions, num_replicas: int, num_cores: int, *, on_gpu: bool) -> EngineOptions:
    """Return the options of one of so many replicas on a machine with so many cores. Its share of the cores
    limits its threads, or beside a GPU its CPU workers, if the number of these is not given; its share of the
    memory limits the sizes that are not given."""
    num_cores //= num_replicas
    engine = replace(engine, memory_share=1 / num_replicas)
    if on_gpu:
        return replace(engine, max_cpu_workers=default_num_workers(num_cores))
    return engine if engine.num_threads is not None else replace(engine, num_threads=max(num_cores, 1))


def process_name(number: int) -> str:
    """Return the name of a replica's engine process in logs and errors."""
    return f"the engine process of replica {number}"


def _most_on_gpus(engine: EngineOptions, gpus: tuple[str, ...]) -> tuple[int, str]:
    """Return how many replicas there can be, and why."""
    each = engine.tensor_parallel
    return len(gpus) // each, f"each has {each} {plural('GPU', each)}, and this machine has {len(gpus)}"


def _most_in_memory(engine: EngineOptions) -> tuple[int, str] | None:
    """Return how many replicas on a CPU have room for their KV caches, and why; None if no size was given.

    This is checked here because each replica alone finds the whole machine free when it starts. Sizes that
    are not given are divided among the replicas (`with_share`).
    """
    if engine.kv_memory_bytes is None:
        return None
    each, available = engine.kv_memory_bytes * engine.tensor_parallel, available_bytes()
    why = f"each takes {each:,} bytes with --kv-memory, and this machine has {available:,} to give"
    return min(available // max(each, 1), MAX_REPLICAS), why


def _gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := os.environ.get(_VISIBLE)) is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    return tuple(str(number) for number in range(len(list(_GPUS.iterdir())))) if _GPUS.is_dir() else ()
