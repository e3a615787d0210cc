"""Tensor parallelism: a model cut into equal shards, one for each process that computes it.

Linears that read the whole hidden state (q, k, v, gate, up) are cut by output, those that read their results
(o, down) by input: between the two a process needs nothing from the others, and the second kind yields
partial sums. A shard is itself a model, with fewer heads and a narrower MLP: kernels, KV caches and adapter
slabs need not know that there are other shards.

An adapter is cut as its linears are. By output: A whole, B cut. By input: A cut, B whole, so its partial sums
are added up together with the base model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Final

import torch

from loraplex.core.errors import ModelError
from loraplex.core.shape import ModelShape
from loraplex.model.config import ModelConfig

CUT_BY_INPUT: Final = frozenset({"o_proj", "down_proj"})
"""Modules that yield partial sums, to be added up; all others are cut by output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Shard `index` of `count` equal ones."""

    index: int
    count: int

    def part(self, size: int) -> slice:
        """Return this shard's part of an axis whose size is divisible by `count`."""
        assert size % self.count == 0
        width = size // self.count
        return slice(self.index * width, (self.index + 1) * width)

    def config(self, config: ModelConfig) -> ModelConfig:
        """Return the shard's own config. Raises ModelError if the model cannot be cut into equal shards."""
        shape = config.shape
        if any(size % self.count != 0 for size in _cut_sizes(shape)):
            raise ModelError(
                f"the model does not divide into {self.count} equal parts: it has {shape.num_heads} "
                f"attention heads, {shape.num_kv_heads} KV heads and an MLP of {shape.intermediate_size}; "
                f"--tensor-parallel can be {_working_counts(shape)}"
            )
        return replace(
            config,
            shape=replace(
                shape,
                num_heads=shape.num_heads // self.count,
                num_kv_heads=shape.num_kv_heads // self.count,
                intermediate_size=shape.intermediate_size // self.count,
            ),
        )

    def whole(self, shape: ModelShape) -> ModelShape:
        """Return the shape of the whole model, given this shard's shape."""
        return replace(
            shape,
            num_heads=shape.num_heads * self.count,
            num_kv_heads=shape.num_kv_heads * self.count,
            intermediate_size=shape.intermediate_size * self.count,
        )

    def linear(self, module: str, weight_OI: torch.Tensor) -> torch.Tensor:
        """Return this shard's part of a linear's weight, as a view."""
        if module in CUT_BY_INPUT:
            return weight_OI[:, self.part(weight_OI.shape[1])]
        return weight_OI[self.part(weight_OI.shape[0])]

    def bias(self, module: str, bias_O: torch.Tensor) -> torch.Tensor:
        """Return this shard's part of a linear's bias. A bias on partial sums is zero in all shards but the
        first."""
        if module in CUT_BY_INPUT:
            return bias_O if self.index == 0 else torch.zeros_like(bias_O)
        return bias_O[self.part(bias_O.shape[0])]

    def vocabulary(self, weight_VH: torch.Tensor) -> torch.Tensor:
        """Return this shard's part of the output embedding. All parts have one size; the last are
        zero-padded."""
        width = -(-weight_VH.shape[0] // self.count)
        part = weight_VH[self.index * width : (self.index + 1) * width]
        missing = width - part.shape[0]
        return part if missing == 0 else torch.nn.functional.pad(part, (0, 0, 0, missing))


WHOLE: Final = Shard(index=0, count=1)


def _cut_sizes(shape: ModelShape) -> tuple[int, int, int]:
    return shape.num_heads, shape.num_kv_heads, shape.intermediate_size


def _working_counts(shape: ModelShape) -> str:
    most = gcd(*_cut_sizes(shape))
    counts = [str(count) for count in range(1, most + 1) if most % count == 0]
    return counts[0] if len(counts) == 1 else f"{', '.join(counts[:-1])} or {counts[-1]}"
