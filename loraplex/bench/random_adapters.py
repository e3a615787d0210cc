"""Adapters with random weights, for benchmarks: an adapter costs what its rank and modules say.

On the host they share one block of random numbers, so that thousands of them fit into memory; on the device
each has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loraplex.adapters.spec import AdapterSpec, LoraModule
from loraplex.core.shape import ModelShape


def random_spec(name: str, shape: ModelShape, rank: int, modules: Sequence[str]) -> AdapterSpec:
    """An adapter of one rank on these modules of every layer; it has no files."""
    loras = tuple(
        LoraModule(layer=layer, module=module, rank=rank, scale=1.0 / rank, a_name="", b_name="")
        for layer in range(shape.num_layers)
        for module in modules
    )
    num_params = sum(rank * (shape.in_features(m.module) + shape.out_features(m.module)) for m in loras)
    return AdapterSpec(version=name, path=Path(name), modules=loras, num_params=num_params)
