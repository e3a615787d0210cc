"""The costs of a CUDA engine, and the number of its CPU workers, which they decide."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.core.modules import GROUPS
from loraplex.core.shape import ModelShape
from loraplex.engine.cuda.options import CudaOptions
from loraplex.engine.machine import max_threads
from loraplex.engine.profile_subject import known_costs
from loraplex.perf.assist_split import default_num_workers
from loraplex.perf.cost_model import CostModel, with_copies_at_most
from loraplex.scheduling.cpu_workers import choose_num_workers


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaCosts:
    """An engine's costs, read once at its start. `num_workers`: CPU workers to start."""

    model: CostModel
    num_workers: int


def cuda_costs(options: CudaOptions, shape: ModelShape, device: str) -> CudaCosts:
    """Return the engine's costs, with copies slowed down to `max_copy_bytes_per_s`. `shape`: shape of the
    model, or of each shard."""
    model, limit = known_costs(shape, device, options.dtype), options.max_copy_bytes_per_s
    if limit is not None:
        model = with_copies_at_most(model, limit)
    return CudaCosts(model=model, num_workers=_num_workers(options, shape, model))


def _num_workers(options: CudaOptions, shape: ModelShape, costs: CostModel) -> int:
    """Return the number that was asked for, or the automatic one."""
    if options.padded_to is not None:
        return 0
    if options.cpu_workers is not None:
        return options.cpu_workers
    most = default_num_workers(max_threads())
    if options.max_cpu_workers is not None:
        most = min(most, options.max_cpu_workers)
    rank_params = shape.num_layers * sum(
        shape.in_features(module) + shape.out_features(module) for module in GROUPS["qkv"]
    )
    rank_bytes = rank_params * costs.subject.element_bytes
    return choose_num_workers(options.cold_start, costs, rank_bytes=rank_bytes, most=most)
