"""The share of a Ray cluster that each replica of a fleet has: GPUs or cores of one node, which it reserves,
and memory there, which limits the sizes that are not given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import UserError
from loraplex.core.words import plural
from loraplex.engine.options import EngineOptions
from loraplex.perf.assist_split import default_num_workers
from loraplex.server.fleet.ray_messages import Connected, Node, Resources


def share_of(engine: EngineOptions, about: Connected, num_replicas: int) -> tuple[EngineOptions, Resources]:
    """Return the engine's options for its share of the cluster, and the resources that Ray reserves for it.

    Raises UserError if there is too little for all replicas.
    """
    has_gpus = any(node.gpus for node in about.nodes) if engine.device == "auto" else engine.device != "cpu"
    if has_gpus:
        gpus = engine.tensor_parallel
        _check(num_replicas, gpus, "GPU", [(node.host, node.gpus) for node in about.nodes], about.free.gpus)
        device = "cuda" if engine.device == "auto" else engine.device
        engine = replace(engine, device=device, cpu_workers=_cpu_workers(engine, about, num_replicas))
        resources = {"GPU": float(gpus), "CPU": 1.0 + (engine.cpu_workers or 0)}
        return _with_memory(engine, about, resources, num_replicas), resources
    cores = engine.num_threads or _most_cores(about.nodes, num_replicas)
    _check(num_replicas, cores, "core", [(node.host, node.cpus) for node in about.nodes], about.free.cpus)
    engine, resources = replace(engine, device="cpu", num_threads=cores), {"CPU": float(cores)}
    return _with_memory(engine, about, resources, num_replicas), resources


def _with_memory(
    engine: EngineOptions, about: Connected, resources: Resources, num_replicas: int
) -> EngineOptions:
    """Return the engine's options with its share of a node's memory. Ray chooses the nodes when replicas
    start, so it is that of as many as there may be on one."""
    there = ({"CPU": node.cpus, "GPU": node.gpus} for node in about.nodes)
    most = max(min(int(node[kind] // number) for kind, number in resources.items()) for node in there)
    return replace(engine, memory_share=1 / min(max(most, 1), num_replicas))


def _cpu_workers(engine: EngineOptions, about: Connected, num_replicas: int) -> int | None:
    """Return the number of CPU workers that each replica starts, as far as it is not given: those of its
    share of a node's cores, and none with `auto`, because only an engine itself knows whether they pay, which
    is too late to reserve cores for them."""
    if engine.cpu_workers is not None or engine.tensor_parallel > 1:
        return engine.cpu_workers
    if engine.cold_start is ColdStart.AUTO:
        return 0
    if engine.cold_start is not ColdStart.CPU_ASSIST:
        return None
    cores_each = [node.cpus / node.gpus for node in about.nodes if node.gpus]
    cores = min([*cores_each, about.free.cpus / num_replicas])
    return default_num_workers(int(cores))


def _most_cores(nodes: Sequence[Node], num_replicas: int) -> int:
    """Return the most cores that every replica can have on a single node; one if there are too few."""
    largest = max((int(node.cpus) for node in nodes), default=0)
    return next(
        (
            cores
            for cores in range(largest, 0, -1)
            if sum(int(node.cpus // cores) for node in nodes) >= num_replicas
        ),
        1,
    )


def _check(
    num_replicas: int, each: int, kind: str, there: Sequence[tuple[str, float]], num_free: float
) -> None:
    """Raise UserError unless the nodes have `each` for every replica, and nobody else has reserved them."""
    wanted = num_replicas * each
    wants = (
        f"{num_replicas} {plural('replica', num_replicas)} with {each} {plural(kind, each)} each want "
        f"{wanted} {plural(kind, wanted)}"
    )
    fewer = "--replicas or --tensor-parallel" if kind == "GPU" else "--replicas or --threads"
    if sum(int(number // each) for _, number in there) < num_replicas:
        nodes = ", ".join(f"{number:g} on {host}" for host, number in there)
        other = ", or use --device cpu" if kind == "GPU" else ""
        raise UserError(f"{wants}, and Ray has {nodes}; lower {fewer}, add nodes{other}")
    if num_free < wanted:
        raise UserError(
            f"{wants}, and Ray has {num_free:g} that nobody holds; lower {fewer}, or end what holds the rest"
        )
