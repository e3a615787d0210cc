"""Guessed costs for routing to replicas without a measured profile."""

from __future__ import annotations

from typing import Final

from loraplex.core.shape import ModelShape
from loraplex.engine.machine import cpu_model, num_cores
from loraplex.perf.cost_model import CostModel
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.subject import Subject, machine_name, shape_key

ELSEWHERE: Final = "servers behind --backend"
"""Machine name for replicas that `loraplex profile` cannot measure."""


def guessed_costs(
    shape: ModelShape, device: str, num_threads: int | None = None, *, machine: str | None = None
) -> CostModel:
    """Return costs in the right proportions, which is enough for routing since the replicas are alike.
    `machine`: the machine they run on, by default the processor of this one."""
    subject = Subject(
        machine=machine or machine_name(num_cores=num_cores(), cpu=cpu_model()),
        device=device,
        model=shape_key(shape),
        dtype="bfloat16" if device == "cuda" else "float32",
        num_layers=shape.num_layers,
    )
    return default_cost_model(subject, shape, num_cores=num_threads or num_cores())
