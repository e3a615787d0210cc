"""Replicas on this machine: engine processes, each with GPUs or cores of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from loraplex.core.errors import UserError
from loraplex.core.shape import ModelShape
from loraplex.core.words import plural
from loraplex.engine.machine import cpu_model, max_threads, num_cores
from loraplex.engine.options import EngineOptions
from loraplex.fleet.answer_length import FIRST_GUESS
from loraplex.fleet.routers.named import router_named
from loraplex.perf.cost_model import CostModel
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.profile_json import profile_to_json
from loraplex.perf.subject import Subject, shape_key
from loraplex.server.engine_client import ClientOptions, EngineClient
from loraplex.server.fleet.decision_log import DecisionLog
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.routing_events import Began, Limits
from loraplex.server.protocol_ipc import Ready

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_GPUS: Final = Path("/proc/driver/nvidia/gpus")


def local_fleet(
    engine: EngineOptions,
    shape: ModelShape,
    *,
    num_replicas: int,
    routing: str,
    factory: str,
    log: DecisionLog | None = None,
) -> FleetEngine:
    """Return a fleet of engine processes on this machine, which is not started yet.

    Raises UserError for a routing that does not exist, and where there are too few GPUs.
    """
    router_named(routing)
    gpus = _gpus() if engine.device != "cpu" else ()
    env = _shares(gpus, num_replicas, engine.tensor_parallel) if gpus else [{}] * num_replicas
    if not gpus and engine.num_threads is None:
        engine = replace(engine, num_threads=max(max_threads() // num_replicas, 1))
    clients = [EngineClient(engine, factory=factory, options=ClientOptions(env=shown)) for shown in env]

    def begin(infos: Sequence[Ready]) -> Began:
        limits = [
            Limits(max_running=engine.max_running, kv_tokens=max(info.num_kv_blocks * engine.block_size, 1))
            for info in infos
        ]
        costs = _guessed_costs(shape, "cuda" if gpus else "cpu", engine.num_threads)
        return Began(routing=routing, limits=limits, costs=profile_to_json(costs), mean_tokens=FIRST_GUESS)

    return FleetEngine(clients, begin, log)


def _gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := os.environ.get(_VISIBLE)) is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    return tuple(str(number) for number in range(len(list(_GPUS.iterdir())))) if _GPUS.is_dir() else ()


def _shares(gpus: Sequence[str], num_replicas: int, each: int) -> list[dict[str, str]]:
    """Give every replica its own GPUs."""
    needed = num_replicas * each
    if needed > len(gpus):
        raise UserError(
            f"{num_replicas} {plural('replica', num_replicas)} with {each} {plural('GPU', each)} each need "
            f"{needed} GPUs, and this machine has {len(gpus)}; lower --replicas or --tensor-parallel, or use "
            "--device cpu"
        )
    return [{_VISIBLE: ",".join(gpus[number * each : (number + 1) * each])} for number in range(num_replicas)]


def _guessed_costs(shape: ModelShape, device: str, num_threads: int | None) -> CostModel:
    """Return costs in the right proportions; the replicas are alike, so that routers need no more."""
    dtype, element_bytes = ("bfloat16", 2) if device == "cuda" else ("float32", 4)
    subject = Subject(
        machine=f"{num_cores()} cores of {cpu_model()}",
        device=device,
        model=shape_key(shape),
        dtype=dtype,
        num_layers=shape.num_layers,
    )
    return default_cost_model(
        subject, shape, element_bytes=element_bytes, num_cores=num_threads or num_cores()
    )
